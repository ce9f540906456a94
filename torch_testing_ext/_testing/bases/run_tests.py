"""`run_tests`, which a test file calls when it runs as a script: unittest's command line with a few more options."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import unittest
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

from torch_testing_ext._machine import random_state
from torch_testing_ext._process import shell_words, signals, user_commands
from torch_testing_ext._testing.bases import invocation
from torch_testing_ext._testing.bases.fixture_suites import FixtureSuite
from torch_testing_ext._testing.bases.tests_for_pytest import (
    PytestStyleTest,
    if_no_test,
    pytest_style_tests,
    why_not_run,
)
from torch_testing_ext._torch import imported_garbage

from .exit_guard import EXIT_FAILED, ExitGuard

# Keeps these frames out of unittest's tracebacks.
__unittest = True

# The exit code that unittest has since Python 3.12.
EXIT_NO_TESTS = 5
EXIT_INTERRUPTED = 130


def run_tests(argv: Sequence[str] | None = None) -> None:
    """Run the tests of the main module and exit with unittest's exit code; 5 if there are no tests."""
    argv = list(sys.argv if argv is None else argv)
    options, rest = _parser().parse_known_args(argv[1:])
    rest = [argv[0], *rest]
    if "-h" in rest or "--help" in rest:
        print(_parser().format_help())
    if options.seed is not None:
        random_state.SEED = options.seed
    if options.hypothesis_profile is not None:
        # Properties look there, also in ranks.
        os.environ["HYPOTHESIS_PROFILE"] = options.hypothesis_profile
    if options.accept:
        # Expecttest looks there, in this process and in those it starts.
        os.environ["EXPECTTEST_ACCEPT"] = "1"
    random_state.set_rng_seed()
    for name, reason in _NOT_NEEDED.items():
        if getattr(options, name):
            print(f"--{name.replace('_', '-')} has no effect: {reason}", file=sys.stderr)
    if options.showlocals:
        rest.insert(1, "--locals")
    signals.keep_exit_codes()
    imported_garbage.exempt_imported()
    streams = sys.stdout, sys.stderr
    _Runner.guard = ExitGuard()
    _Runner.guard.install()
    try:
        code = _run(options, rest)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        # A test may leave broken ones, which Python would flush when it exits.
        sys.stdout, sys.stderr = streams
    _Runner.guard.code = code
    sys.exit(code)


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    """Do what the options ask for; return the exit code."""
    if options.discover_tests:
        print("\n".join(_selected(argv)))
        return 0
    if options.use_pytest:
        import pytest

        return int(pytest.main(argv))
    if options.subprocess:
        return _run_each_alone(argv, options.seed)
    for _ in range(max(1, options.repeat)):
        code = _run_once(argv)
        if code:
            return code
    return 0


# The options of unittest that choose how to run a test, not which: with --subprocess, every process gets them.
_RUN_OPTIONS = ("-v", "--verbose", "-q", "--quiet", "-b", "--buffer", "--locals")

_NOT_NEEDED = {
    "save_xml": "for an XML report, run the file with pytest and --junitxml",
    "run_parallel": "the tests of a single file run one after another",
    "log_suffix": "no log is written",
    "jit_executor": "the executor keeps torch's default",
    "test_bailouts": "the executor keeps torch's default",
    "import_slow_tests": "only @slowTest marks a test as slow",
    "import_disabled_tests": "torchtest --disabled FILE reads such a list",
    "rerun_disabled_tests": "no list of disabled tests is read",
}


def _parser() -> argparse.ArgumentParser:
    """Make the parser of our options, and of those of PyTorch's that have no effect here."""
    parser = argparse.ArgumentParser(prog="python test_file.py", add_help=False, allow_abbrev=False)
    parser.usage = "%(prog)s [these options] [unittest's options, below] [TestClass[.test_method] ...]"
    add = parser.add_argument
    add("--seed", type=int, help=f"seed of every test (default: {random_state.SEED})")
    add("--repeat", type=int, default=1, metavar="N", help="run all tests N times, or until one fails")
    add("--subprocess", action="store_true", help="run each test in an interpreter of its own")
    add("--discover-tests", action="store_true", help="list the tests without running them")
    add("--accept", action="store_true", help="rewrite expected output to match the actual output")
    add("--showlocals", action=argparse.BooleanOptionalAction, default=False, help="show local variables in tracebacks")
    add(
        "--hypothesis-profile",
        choices=["search"],
        help="with search, properties that run in ranks run 40 times as many examples, chosen at random",
    )
    add("--use-pytest", action="store_true", help="run the file with pytest, and pass all other options to it")
    hidden = argparse.SUPPRESS
    add("--save-xml", nargs="?", const="test-reports", help=hidden)
    add("--run-parallel", type=int, help=hidden)
    add("--log-suffix", help=hidden)
    add("--jit-executor", "--jit_executor", help=hidden)
    add("--test-bailouts", "--test_bailouts", action="store_true", help=hidden)
    add("--import-slow-tests", nargs="?", const=True, help=hidden)
    add("--import-disabled-tests", nargs="?", const=True, help=hidden)
    add("--rerun-disabled-tests", action="store_true", help=hidden)
    return parser


def _run_once(argv: list[str]) -> int:
    loader = unittest.TestLoader()
    loader.suiteClass = _Suite
    ran: Any = _Program(module="__main__", argv=argv, testRunner=_Runner, testLoader=loader, exit=False)
    result = ran.result
    if getattr(result, "interrupted", False):
        return EXIT_INTERRUPTED
    if not result.wasSuccessful():
        return EXIT_FAILED
    return _nothing_tested() if result.testsRun == 0 and not result.skipped else 0


def _nothing_tested() -> int:
    print("No test was found, so nothing was tested: --discover-tests lists the tests of the file.", file=sys.stderr)
    return EXIT_NO_TESTS


class _Program(unittest.TestProgram):
    """unittest's command line. Of the tests that it selects, those that only pytest would run are errors, by name."""

    def runTests(self) -> None:
        _Runner.left_out = self._left_out()
        super().runTests()

    def _left_out(self) -> list[PytestStyleTest]:
        # What the arguments have set.
        known: Any = self
        # Tests for pytest alone are no part of a selection.
        if known.testNames is not None:
            return []
        patterns = known.testNamePatterns or ["*"]
        return [
            test
            for test in pytest_style_tests(sys.modules["__main__"], _flatten(known.test))
            if any(fnmatchcase(f"__main__.{_name_of(test)}", pattern) for pattern in patterns)
        ]


class LeftOut(Exception):
    """unittest does not run a test that it finds in the file."""

    __module__ = f"{__name__.partition('.')[0]}.common_utils"


def _name_of(test: PytestStyleTest) -> str:
    return f"{test.cls}.{test.method}".lstrip(".")


def _explain_left_out(test: PytestStyleTest) -> LeftOut:
    how = user_commands.command(*invocation.python_arguments, user_commands.relative(sys.argv[0]), "--use-pytest")
    return LeftOut(f"{why_not_run(test)}. pytest does: {how}\n{if_no_test(test)}")


class _Suite(FixtureSuite):
    """Tells the guard which fixture is running."""

    def fixture_began(self, name: str, owner: Any, result: Any) -> None:
        _Runner.guard.running = name

    def fixture_ended(self, name: str, result: Any) -> None:
        _Runner.guard.running = ""


class _Result(unittest.TextTestResult):
    """Tells the guard which test is running."""

    def startTest(self, test: unittest.TestCase) -> None:
        _Runner.guard.running = test.id()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        _Runner.guard.running = ""


class _Runner(unittest.TextTestRunner):
    """unittest's runner, except that it prints its report after Ctrl-C and after an exit, too."""

    guard: ExitGuard
    left_out: Sequence[PytestStyleTest] = ()
    resultclass = _Result  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        self._own_stream = _own_stderr()
        super().__init__(**{"stream": self._own_stream, **options})

    def run(self, test: Any) -> Any:
        """Run a suite, and report the tests that were left out as errors."""

        def run_until_interrupted(result: Any) -> None:
            _unittest_suite: Any = unittest.suite
            try:
                test(result)
            except KeyboardInterrupt:
                result.interrupted = True
                result.stop()
                self.stream.writeln("\nInterrupted: the tests that follow were not run.")
            except SystemExit:
                # In a suite that load_tests made: ours does not let it through.
                result.addError(_unittest_suite._ErrorHolder("the tests that follow were not run"), sys.exc_info())
            for left_out in self.left_out:
                error = _explain_left_out(left_out)
                result.addError(_unittest_suite._ErrorHolder(_name_of(left_out)), (LeftOut, error, None))

        self.guard.code = None
        try:
            result = super().run(run_until_interrupted)  # type: ignore[arg-type]
        finally:
            if self._own_stream is not sys.stderr:
                self._own_stream.close()
        self.guard.code = 0 if result.wasSuccessful() else EXIT_FAILED
        return result


def _own_stderr() -> Any:
    """A stream to the same file as sys.stderr, which a test may close or replace."""
    try:
        if sys.stderr.fileno() == 2:
            return open(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
    except (OSError, ValueError, AttributeError):
        pass
    return sys.stderr


def _selected(argv: list[str]) -> list[str]:
    """Return the names of the tests that unittest would run for this command line."""

    def names_of(suite: Any) -> list[str]:
        ids = [test.id() for test in _flatten(suite)]
        return [name.partition(".")[2] for name in ids]

    lister: Any = SimpleNamespace(run=names_of)
    listed: Any = _Program("__main__", argv=argv, testRunner=lister, testLoader=unittest.TestLoader(), exit=False)
    names: list[str] = listed.result
    return names


def _flatten(suite: Any) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase) or not hasattr(suite, "__iter__"):
        yield suite
        return
    for part in suite:
        yield from _flatten(part)


def _run_each_alone(argv: list[str], seed: int | None) -> int:
    """Run each test in an interpreter of its own; return the exit code."""
    names = _selected(argv)
    if not names and not _Runner.left_out:
        return _nothing_tested()
    file, *words = argv
    options = [word for word in words if word in _RUN_OPTIONS]
    command = [sys.executable, *invocation.python_arguments, file, *options]
    if seed is not None:
        command.append(f"--seed={seed}")
    failed = [name for name in names if subprocess.run([*command, name]).returncode != 0]
    for name in failed:
        print(f"failed: {name}; to run it alone: {shell_words.join([*command, name])}", file=sys.stderr)
    for test in _Runner.left_out:
        print(f"failed: {_name_of(test)}: {_explain_left_out(test)}", file=sys.stderr)
    print(f"Ran {len(names)} tests, each in a process of its own: {len(failed)} failed.", file=sys.stderr)
    return EXIT_FAILED if failed or _Runner.left_out else 0
