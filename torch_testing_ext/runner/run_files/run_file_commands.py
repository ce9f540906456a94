"""The commands that read files of runs: merge, replay, diff, history and census."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.files import write_atomically
from torch_testing_ext._process.words import count
from torch_testing_ext.runner.events import AttemptEnded, Event, Output, RunEnded, TestFinished, TestIsSlow
from torch_testing_ext.runner.model import ExitCode, TestId, exit_code
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.options.commands import COMMANDS
from torch_testing_ext.runner.options.default_folders import default_folders
from torch_testing_ext.runner.options.values import Verbosity
from torch_testing_ext.runner.report import remake_reports
from torch_testing_ext.runner.report.console import Console
from torch_testing_ext.runner.report.console_layout import ConsoleLayout
from torch_testing_ext.runner.report.console_style import Styler
from torch_testing_ext.runner.report.journal import WHILE_RUNNING
from torch_testing_ext.runner.report.journal_reader import RecordedRun
from torch_testing_ext.runner.report.terminal_stream import TerminalStream
from torch_testing_ext.runner.scheduling.earlier_runs import Durations

from .census import take_census
from .census_text import census_document, census_lines
from .ci_jobs import read_ci_jobs
from .definitions import find_definitions
from .differences import changes, difference_lines, differences
from .folding import folded, merged
from .histories import histories, history_lines
from .known_holes import read_known_holes
from .reading import paths_of, read_results, results_of_file
from .results import RunResults
from .run_file import BadResults, ConsoleOfRun, RunFile, TornFile, read_run_file, write_run_file


def of_run_files(command: str, argv: Sequence[str], root: Path) -> int:
    """Do a command, and return its exit code. Raises UsageError."""
    # A collector would look through all events again and again, and find nothing to collect.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _COMMANDS[command](argv, root)
    except BadResults as error:
        raise UsageError(f"{command}: {error}") from None
    finally:
        if collects:
            gc.enable()


class _Parser(argparse.ArgumentParser):
    """The parser of one command, whose texts are where all commands have theirs."""

    def __init__(self, command: str):
        spec = COMMANDS[command]
        super().__init__(
            f"{user_commands.runner()} {command}",
            f"%(prog)s {spec.usage}",
            spec.description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._command = command

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._command}: {message} (--help lists the options)")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadResults(f"{path} could not be written: {error.strerror}") from None


def _merge(argv: Sequence[str], root: Path) -> int:
    parser = _Parser("merge")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a run file, or a pattern of several")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the merged run file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report of all")
    parser.add_argument("--junitxml", type=Path, metavar="FILE", help="write a JUnit XML report of all")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--learn", action="store_true", help="keep the durations, by which later shards are balanced")
    parser.add_argument(
        "--since", nargs="+", default=[], metavar="FILE", help="mark in the HTML report what is new since this run"
    )
    words = parser.parse_args(argv)
    before = _all_results(words.since)
    files, torn = _run_files(words.files)
    if not files:
        raise UsageError(f"merge: {'; '.join(torn)}")
    runs, missing = merged(files)
    whole = dataclasses.replace(files[0], runs=runs, missing=missing)
    run = folded(list(whole.recorded(WHILE_RUNNING)), missing)
    if words.output is not None:
        with _writing(words.output):
            write_run_file(words.output, runs, missing)
    options = Options(html=words.html, junitxml=words.junitxml, results=words.results)
    changed = {}
    if before:
        now = [results for file in files for results in results_of_file(file)]
        changed = changes(differences(before, now))
    reporters = remake_reports(options, sys.stdout, os.environ, run, changed)
    if words.learn:
        Durations(root / options.cache, _warn).record(run.summary.finished)
    for name in torn:
        sys.stderr.write(f"{user_commands.runner_name()}: merge: {name}\n")
    for shard in missing:
        sys.stderr.write(f"{user_commands.runner_name()}: merge: shard {shard} is missing\n")
    code = exit_code(run.summary, run.header.allow_all_skipped)
    if reporters.errors and code is not ExitCode.FAILED:
        return ExitCode.OUR_ERROR
    return ExitCode.FAILED if torn or missing else code


def _run_files(words: Sequence[str]) -> tuple[list[RunFile], list[str]]:
    """The run files that words name, and those that are missing or torn, in words."""
    files, torn = [], []
    for path in paths_of(words):
        if not path.exists():
            torn.append(f"{path} is missing")
            continue
        try:
            files.append(read_run_file(path))
        except TornFile as error:
            torn.append(str(error))
    return files, torn


def _replay(argv: Sequence[str], root: Path) -> int:
    parser = _Parser("replay")
    parser.add_argument("file", type=Path, metavar="FILE", help="a run file")
    parser.add_argument("test", nargs="?", metavar="TEST", help="only this test")
    words = parser.parse_args(argv)
    file = read_run_file(words.file)
    run = folded(list(file.recorded(without=())), file.missing)
    events = run.events
    if words.test is not None:
        events = _of_test(run, words.test)
    shown = file.runs[0].facts.console
    console = _console(shown, run)
    for event in events:
        console.on_event(event)
    return exit_code(run.summary, run.header.allow_all_skipped)


def _console(shown: ConsoleOfRun, run: RecordedRun) -> Console:
    layout = ConsoleLayout(complete=shown.complete, show=shown.show, whole=shown.verbosity is Verbosity.VERBOSE)
    return Console(
        TerminalStream(sys.stdout),
        Styler(shown.coloured),
        shown.verbosity,
        shown.durations,
        run.header.policy,
        run.header.command,
        layout,
        lambda: shown.columns,
        shown.status_level,
    )


def _of_test(run: RecordedRun, name: str) -> tuple[Event, ...]:
    """The events of tests of this name, and a summary of these alone."""
    tests = {finished.test.id for finished in run.summary.finished}
    meant = {test for test in tests if name == str(test)} or {
        test for test in tests if str(test).endswith(name) or test.method.partition("[")[0] == name
    }
    if not meant:
        raise BadResults(f"no test of this run is called {name}")

    def is_meant(event: Event) -> bool:
        match event:
            case AttemptEnded(attempt):
                return attempt.test.id in meant
            case TestFinished(finished):
                return finished.test.id in meant
            case Output(test, _):
                return test in meant
            case TestIsSlow(test=slow):
                return slow.id in meant
        return False

    finished = tuple(each for each in run.summary.finished if each.test.id in meant)
    summary = dataclasses.replace(run.summary, finished=finished, unfinished=(), warnings=())
    return (*filter(is_meant, run.events), RunEnded(summary))


def _diff(argv: Sequence[str], root: Path) -> int:
    parser = _Parser("diff")
    parser.add_argument("before", metavar="BEFORE", help="a run file, or JUnit XML")
    parser.add_argument("after", metavar="AFTER", help="the same of a later run")
    words = parser.parse_args(argv)
    found = differences(_all_results([words.before]), _all_results([words.after]))
    _print("\n".join(difference_lines(found)))
    return ExitCode.FAILED if found.new_failures else ExitCode.PASSED


def _history(argv: Sequence[str], root: Path) -> int:
    parser = _Parser("history")
    parser.add_argument("test", metavar="TEST", help="the id of a test, or the end of it")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a run file or JUnit XML, or a pattern of several")
    words = parser.parse_args(argv)
    found = histories(words.test, _all_results(words.files))
    if not found:
        raise UsageError(f"history: none of these runs has a test {words.test}")
    _print("\n\n".join("\n".join(history_lines(history)) for history in found))
    return ExitCode.PASSED


def _all_results(words: Sequence[str]) -> list[RunResults]:
    found: list[RunResults] = []
    digests: dict[str, str] = {}
    for path in paths_of(words):
        for results in read_results(path):
            if not results.digest or digests.setdefault(results.digest, results.name) == results.name:
                found.append(results)
    return found


def _census(argv: Sequence[str], root: Path) -> int:
    parser = _Parser("census")
    parser.add_argument("files", nargs="*", metavar="FILE", help="run files and JUnit XML of any runner, or folders")
    parser.add_argument("--tests", nargs="+", type=Path, default=[], metavar="DIR", help="the folders with tests")
    parser.add_argument(
        "--collected", action="append", type=Path, default=[], metavar="FILE", help="a list by pytest --collect-only -q"
    )
    parser.add_argument("--known", type=Path, metavar="FILE", help="holes that are known, each with a day and a reason")
    parser.add_argument("--max-new", type=int, metavar="N", help="exit with 1 above N holes that are not known")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the census as JSON")
    words = parser.parse_args(argv)
    if words.max_new is not None and words.max_new < 0:
        raise UsageError("census: --max-new is a number from 0")
    places = [_place(path, root) for path in words.tests] or list(default_folders(root))
    root = root.resolve()
    if not all(place.is_relative_to(root) for place in places):
        # A project that knows nothing of us may be elsewhere.
        root = Path(os.path.commonpath([place.parent for place in places]))
    all_results, torn = _results_and_torn(words.files)
    census = take_census(
        find_definitions(root, places),
        all_results,
        collected=[test for path in words.collected for test in _collected_in(path)],
        known=read_known_holes(words.known) if words.known else (),
        today=date.today(),
        torn=torn,
        jobs=read_ci_jobs(root, places),
    )
    if not census.tests:
        raise UsageError(f"census: no tests in {', '.join(map(str, places))}: --tests names their folders")
    results = sum(len(each.results) for each in all_results)
    if results and len(census.strangers) == results:
        raise UsageError(
            f"census: none of {count(results, 'result')} is of a test in {', '.join(map(str, places))}, such as "
            f"{census.strangers[0]}: name results of this project, and its folders with --tests"
        )
    if words.json is not None:
        with _writing(words.json):
            write_atomically(words.json, json.dumps(census_document(census), indent=1) + "\n")
    _print("\n".join(census_lines(census)))
    if words.max_new is not None and census.new_holes > words.max_new:
        return ExitCode.FAILED
    return ExitCode.PASSED


def _place(path: Path, root: Path) -> Path:
    place = path.resolve()
    if not place.exists():
        raise UsageError(f"census: --tests {path}: there is no such folder")
    return place


def _results_and_torn(words: Sequence[str]) -> tuple[list[RunResults], list[str]]:
    found: dict[object, RunResults] = {}
    torn = []
    for path in paths_of(words):
        try:
            for results in read_results(path):
                found[results.digest or (results.name, len(found))] = results
        except TornFile:
            torn.append(str(path))
    return list(found.values()), torn


def _collected_in(path: Path) -> list[TestId]:
    """The tests in a list that pytest has written."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror}") from None
    found = []
    for line in lines:
        head, bracket, parameters = line.strip().partition("[")
        parts = head.split("::")
        if len(parts) > 1 and parts[0].endswith(".py"):
            found.append(TestId(parts[0], "::".join(parts[1:-1]), f"{parts[-1]}{bracket}{parameters}"))
    return found


_COMMANDS: Mapping[str, Callable[[Sequence[str], Path], int]] = {
    "merge": _merge,
    "replay": _replay,
    "diff": _diff,
    "history": _history,
    "census": _census,
}
