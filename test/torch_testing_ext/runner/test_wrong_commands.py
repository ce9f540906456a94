"""Wrong command lines, settings and variables of torchtest: each is refused in a line with its place and the remedy.

None of them gets as far as a process that imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_testing_ext._process.setting_names import PREFIX
from torch_testing_ext.runner import cli
from torch_testing_ext.runner.model import ExitCode

# By the words after `torchtest`: the place (the word that is wrong), the cause, and the remedy.
COMMANDS = {
    # Options of pytest, and of plugins.
    "-n 4": ("-n", "an option of pytest", "use -j N of torchtest"),
    "-n4": ("-n4", "an option of pytest", "use -j N of torchtest"),
    "--numprocesses 4": ("--numprocesses", "an option of pytest", "use -j N of torchtest"),
    "--tb=short": ("--tb", "an option of pytest", "torchtest -- --tb=short"),
    "-rA": ("-rA", "an option of pytest", "torchtest -- -rA"),
    "-p no:randomly": ("-p", "an option of pytest", "torchtest -- -p no:randomly"),
    "--color yes": ("--color", "an option of pytest", "torchtest -- --color yes"),
    "--setup-show": ("--setup-show", "an option of pytest", "torchtest -- --setup-show"),
    "--cov-report=term": ("--cov-report", "an option of pytest", "and then coverage report"),
    "--basetemp x": ("--basetemp", "an option of pytest", "TMPDIR"),
    "--stepwise": ("--stepwise", "an option of pytest", "use -x and --lf of torchtest"),
    "--junit x.xml": ("--junit", "an option of pytest", "use --junitxml of torchtest"),
    "--rank-timeout 3": ("--rank-timeout", "an option of pytest", "use --timeout of torchtest"),
    "--forked": ("--forked", "an option of pytest", "each test has processes of its own"),
    "--fixtures": ("--fixtures", "an option of pytest", "it runs no test: use pytest"),
    "-- -n 4": ("-n", "", "use -j N of torchtest"),
    "-- --cov=src": ("--cov=src", "", "use --cov of torchtest"),
    "-- --markers": ("--markers", "it runs no test", "use pytest"),
    "-- test_a.py": ("test_a.py", "only options of pytest follow", "write names of tests before --"),
    # Options of plugins that are not here.
    "--count 3": ("--count", "is not an option", "Use --repeat N"),
    "--random-order": ("--random-order", "is not an option", "Use --shuffle"),
    "--nproc-per-node=2": ("--nproc-per-node", "is not an option", "Use --world-size N"),
    # Misspelt options and commands, and those of other runners.
    "--verison": ("--verison", "is not an option", "Did you mean: --version?"),
    "--hlep": ("--hlep", "is not an option", "Did you mean: --help"),
    "--lst": ("--lst", "is not an option", "Did you mean: --list?"),
    "--retry 2": ("--retry", "is not an option", "Did you mean: --retries"),
    "--world 4": ("--world", "is not an option", "Did you mean: --world-size?"),
    "--budgets": ("--budgets", "is not an option", "Did you mean: --update-budgets?"),
    "--fail-fast": ("--fail-fast", "is not an option", "Use -x"),
    "--no-capture": ("--no-capture", "is not an option", "Use -s"),
    "--ff": ("--ff", "is not an option", "Use --last-failed"),
    "--zzz": ("--zzz", "is not an option", "--help lists the options"),
    "inti": ("inti", "no test file", "Did you mean the command init?"),
    "shw": ("shw", "no test file", "Did you mean the command show?"),
    "show --jbs 2": ("--jbs", "show has no option", "show --help lists its options"),
    # Values that are missing, or wrong.
    "-o": ("-o", "needs a value", "--help"),
    "-m": ("-m", "needs a value", "such as -m 'not slow'"),
    "-k": ("-k", "needs a value", "such as -k 'sum and not slow'"),
    "--html": ("--html", "needs a value", "such as --html report.html"),
    "--jobs many": ("--jobs", "'many'", "whole number of at least 1"),
    "--jobs 0": ("--jobs", "'0'", "whole number of at least 1"),
    "--timeout 1m": ("--timeout", "'1m'", "positive number of seconds"),
    "--shard 4/3": ("--shard", "'4/3'", "write I/N, such as 1/3"),
    "--repeat 0": ("--repeat", "'0'", "whole number of at least 1"),
    "--maxfail x": ("--maxfail", "'x'", "whole number of at least 1"),
    "--gpus 0": ("--gpus", "'0' is a number of GPUs", "write '0,' for GPU 0, or 'none'"),
    "--gpus -1": ("--gpus", "'-1'", "a list of different devices such as 0,2"),
    "--fake-accelerators 99": ("--fake-accelerators", "not 99", "1 to 16 fake accelerators"),
    "--world-size 0": ("--world-size", "'0'", "whole number of at least 1"),
    "--simulate x": ("--simulate", "'x'", "whole number of at least 1"),
    "--sanitize=race": ("--sanitize", "'race'", "Did you mean: races?"),
    "--sweep explode": ("--sweep", "'explode'", "known are kill"),
    "--warm=maybe": ("--warm", "'maybe'", "one of auto, on, off"),
    "--pdb=1": ("--pdb", "takes no value: leave out '1'", "use --trace=RANK to stop in one rank"),
    "--kill 1": ("--kill", "is not an option", "Use @pytest.mark.faults(faults.kill(...)) on the test"),
    "--rank 1": ("--rank", "is not an option", "Use --trace=RANK"),
    "--list=xml": ("--list", "'xml'", "Use --list or --list=json"),
    "-m slow(": ("-m", "'slow('", "expected 'and', 'or' or the end"),
    "-k and": ("-k", "'and'", "expected a part of a name"),
    "-o jobs": ("-o", "'jobs'", "NAME=VALUE"),
    "-o jobs=many": ("-o jobs", "'many'", "whole number of at least 1"),
    "-o jbs=2": ("-o jbs", "not a setting", "Did you mean: jobs"),
    "-o xfail_strict=true": ("-o xfail_strict", "not a setting", "write -- -o xfail_strict=VALUE"),
    "-o watch=true": ("-o watch", "not a setting", "write it on the command line"),
    # Names that nothing has.
    "test_b.py": ("test_b.py", "no test file", "Did you mean: test_a?"),
    "/nowhere": ("/nowhere", "no test file", "Nearest known: test_a.py"),
    "show test_one": ("test_one", "no run is known", "results"),
    "why": ("why", "", "name a test"),
    "config x": ("config", "it takes no names", "only -o NAME=VALUE"),
    "merge nothing.zip": ("nothing.zip", "", "nothing.zip"),
    "report nothing": ("nothing", "does not exist", ""),
    "report test_a.py": ("test_a.py", "is not the journal of a run", "Without a name"),
    "--rerun nothing.zip": ("nothing.zip", "--rerun", "No such file"),
    "--rerun test_a.py": ("test_a.py", "--rerun", "that --run-file has written"),
    # Options that exclude each other, and what a machine lacks.
    "--list --dry-run": ("--dry-run", "cannot be combined", "Leave out one of them"),
    "--simulate 4 --world-size 2": ("--world-size", "cannot be combined", "Leave out one of them"),
    "--simulate 4 --fake-accelerators 2": ("--simulate", "cannot be combined", "Leave out one of them"),
    "--sweep kill --simulate 4": ("--sweep", "cannot be combined", "Leave out one of them"),
    "--watch --cluster auto": ("--watch", "cannot be combined", "Leave out one of them"),
    "--watch": ("--watch", "stdout is no terminal", "run it in one"),
    "--pdb": ("--pdb", "there is no terminal", "run the test in one"),
    "--cluster ray": ("--cluster", "ray", "ray://HOST:PORT"),
}
# By the text of pyproject.toml.
SETTINGS = {
    "[tool.torchtest]\njobs = 2": ("pyproject.toml", "[tool.torchtest]", "write [tool.torch_testing_ext]"),
    "[tool.torch-testing-ext]\njobs = 2": (
        "pyproject.toml", "[tool.torch-testing-ext]", "write [tool.torch_testing_ext]"
    ),
    "[tool.torch_testing_ext]\njbs = 2": ("pyproject.toml", "jbs", "Did you mean: jobs"),
    "[tool.torch_testing_ext]\njobs = 'many'": ("jobs", "'many'", "whole number of at least 1"),
    "[tool.torch_testing_ext]\njobs = [2]\n[": ("pyproject.toml", "cannot be read", "line 3"),
    "[tool.torch_testing_ext]\nwatch = true": ("watch", "not a setting", "write it on the command line"),
    "[tool.torch_testing_ext]\ntests = 'nowhere'": ("nowhere", "does not exist", "the setting `tests`"),
    "[tool.torch_testing_ext]\ndevices = 'gpu'": ("devices", "'gpu'", "one of auto, cpu"),
    "[tool.torch_testing_ext]\nsanitize = 'race'": ("sanitize", "'race'", "Did you mean: races?"),
    "[tool.torch_testing_ext]\nleaked = 'x'": ("leaked", "'x'", "one of pass, fail"),
    "[tool.torch_testing_ext.sweep]\nwithn = 3": ("sweep.withn", "not a setting", "Did you mean: sweep.within"),
    "[tool.torch_testing_ext]\npytest = '-n 4'": ("pytest", "-n", "use -j N of torchtest"),
    "[tool.torch_testing_ext]\nloader = 'x'": ("loader", "'x'", "one of auto, pytest, unittest"),
    "[tool.torch_testing_ext]\ngpus = '0'": ("gpus", "'0' is a number of GPUs", "write '0,' for GPU 0"),
}  # fmt: skip
# By name and value.
VARIABLES = {
    f"{PREFIX}RUN_RETRIS=2": ("RUN_RETRIS", "not a variable", f"Did you mean: {PREFIX}RUN_RETRIES"),
    f"{PREFIX}RUN_JOBS=x": ("RUN_JOBS", "'x'", "whole number of at least 1"),
    f"{PREFIX}STAR=spawn": ("STAR", "not a variable", f"Did you mean: {PREFIX}START"),
    f"{PREFIX}START=spwn": ("START", "'spwn'", "use auto, fork"),
    f"{PREFIX}SANITIZE=race": ("SANITIZE", "'race'", "races"),
    f"{PREFIX}DEVICES=gpu": ("DEVICES", "not a variable", "Did you mean"),
}


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run torchtest in a project with one test. Returns what it prints, if it refuses the input."""
    monkeypatch.chdir(tmp_path)
    # xdist's is the reason of another refusal.
    for name in [name for name in os.environ if name.startswith((PREFIX, "PYTEST_XDIST_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n")

    def run(words: str) -> str:
        code = cli.main(words.split(), tmp_path)
        printed, message = capfd.readouterr()
        assert (code, printed) == (ExitCode.USAGE, "")
        return message

    return run


def _check(message: str, place: str, cause: str, remedy: str) -> None:
    for part in (place, cause, remedy):
        assert part in message
    assert message.startswith("torchtest: "), "whose error it is"
    assert message.count("\n") == 1, "one line, and no traceback"
    assert not remedy or message.count(remedy) == 1, "told once"


@pytest.mark.parametrize("words", COMMANDS)
def test_command(refusal, words: str) -> None:
    _check(refusal(words), *COMMANDS[words])


@pytest.mark.parametrize("text", SETTINGS)
def test_setting(refusal, tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"{text}\n")
    _check(refusal(""), *SETTINGS[text])


@pytest.mark.parametrize("variable", VARIABLES)
def test_variable(refusal, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    _check(refusal(""), *VARIABLES[variable])
