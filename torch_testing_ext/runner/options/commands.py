"""The commands of the runner, and the options of each."""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext._process import user_commands


@dataclass(frozen=True)
class CommandSpec:
    """A command of the runner: its help, and the options that it has."""

    summary: str
    usage: str = ""
    description: str = ""
    # Their fields; without any, the command reads its words itself.
    options: tuple[str, ...] = ()
    # Whether it is in --help-all, and not in --help.
    is_rare: bool = False


# They read files of runs, and words of their own.
OF_RUN_FILES = ("merge", "replay", "diff", "history", "census")
COMMANDS = {
    "init": CommandSpec("set up a project, and run its first test", "[--agents | --ci [SERVICE]]"),
    user_commands.SHOW: CommandSpec(
        "print the full reports of failures",
        "[options] [NAME ...]",
        "Print the full report of each failure of the latest run, or of the tests NAME.",
        ("json", "journal", "cache"),
    ),
    "report": CommandSpec(
        "write reports of an earlier run",
        "[options] [JOURNAL]",
        "Write reports of the latest run, or of the run of a JOURNAL, and print its summary."
        "\nThe run may have been killed.",
        ("junitxml", "html", "perfetto", "results", "run_file", "durations", "about", "cache"),
    ),
    "why": CommandSpec(
        "explain why --affected selects a test or not",
        "[options] TEST ...",
        "Explain for each TEST why --affected selects it or not. Nothing runs.",
        ("affected", "drop_in", "cache"),
    ),
    "config": CommandSpec(
        "print the options in force, and their sources",
        "[-o NAME=VALUE]",
        "Print the value and the source of every option, those that you have set first.",
    ),
    "merge": CommandSpec(
        "put the run files of many machines together",
        "FILE ... [-o FILE] [--html FILE] [--junitxml FILE] [--results FILE] [--since FILE] [--learn]",
        "Put run files together: one summary, one report, one file. Exits with 1 if a test failed, or a shard"
        "\nis missing or torn.",
        is_rare=True,
    ),
    "replay": CommandSpec(
        "print a run again from its file",
        "FILE [TEST]",
        "Print the output of a run file again, or its report of TEST.",
        is_rare=True,
    ),
    "diff": CommandSpec(
        "compare two runs",
        "BEFORE AFTER",
        "List new failures, and tests that are mended, slower or gone. Exits with 1 if there are new failures.",
        is_rare=True,
    ),
    "history": CommandSpec(
        "show the results of a test in many runs",
        "TEST FILE ...",
        "Show the results of a test in many runs, the oldest first, and how often it failed.",
        is_rare=True,
    ),
    "census": CommandSpec(
        "list the tests that never ran, and why",
        "[FILE ...] [--tests DIR ...] [--known FILE] [--max-new N] [--collected FILE] [--json FILE]",
        "List the tests that exist and were not seen running in these results, by reason and folder. The results"
        "\nmay be of any runner that writes JUnit XML. Without results, list the tests that nothing collects and"
        "\nthose in files that no command of CI names.",
        is_rare=True,
    ),
    "moving": CommandSpec("convert tests from another project's helpers", is_rare=True),
    "cluster clean": CommandSpec(
        "delete leftovers of runs on the nodes of a Ray cluster",
        "[options]",
        "Delete the projects that earlier runs left on the nodes of a Ray cluster.",
        ("cluster", "cluster_timeout"),
        is_rare=True,
    ),
}
