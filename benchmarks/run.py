"""Measure how long a suite takes: run_test.py against the same files, run in sequence on PyTorch's own base classes.

    python benchmarks/run.py [--quick] [--files FILE ...] [--rounds N]

run_on_pytorch.py replaces our classes with PyTorch's. Both sides run the same tests: run_test.py gets exactly those
that pass on PyTorch's classes. PyTorch's time is the sum of these tests' times and their files' start-up times. The
benchmark also measures what run_test.py adds to a test, compared with running the file directly. The exit code is 1 if
a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import Target

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_TEST = ROOT / "run_test.py"
SUITES = "test/distributed"
COMPILES = "_composable/test_replicate_with_compiler.py"
QUICK = ("tensor/parallel/test_ddp_2d_parallel.py", "_spmd/test_data_parallel.py")
MINIMUM_RATIO = 5.0  # for files whose tests do not compile
MOST_OVERHEAD_MS = 30.0
MANY = 500
MOST_TINY_MS = 10.0


@dataclass(frozen=True)
class PyTorchRun:
    """The outcome of a file that ran on PyTorch's classes."""

    file: str
    passed: dict[str, float]  # seconds, by the name that run_test.py accepts
    others: int  # tests that did not pass
    startup: float  # seconds for interpreter and imports

    @property
    def seconds(self) -> float:
        return self.startup + sum(self.passed.values()) if self.passed else 0.0


def timed(command: Sequence[str | Path], extra_path: Sequence[str] = ()) -> tuple[float, str]:
    """Seconds that a command took, and its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*extra_path, str(ROOT)])}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return time.perf_counter() - began, done.stdout + done.stderr


def run_on_pytorch(file: str) -> PyTorchRun:
    with tempfile.TemporaryDirectory() as directory:
        # Every interpreter imports sitecustomize when it starts, including those of ranks.
        Path(directory, "sitecustomize.py").write_text((HERE / "run_on_pytorch.py").read_text())
        report = Path(directory, "report.xml")
        seconds, output = timed(
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file],
            extra_path=[directory],
        )
        if not report.exists():
            raise SystemExit(f"{file} does not run on PyTorch's classes:\n{output}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    times = {case: float(case.get("time", "0")) for case in cases}
    passed = {_name(file, case): times[case] for case in cases if len(case) == 0}
    return PyTorchRun(file, passed, len(cases) - len(passed), seconds - sum(times.values()))


def _name(file: str, case: ElementTree.Element) -> str:
    return f"{file}::{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"


def seconds_by_run_test(names: Iterable[str]) -> float:
    """Seconds that run_test.py takes for these tests; exits unless all of them pass."""
    names = list(names)
    with tempfile.TemporaryDirectory() as cache:
        seconds, output = timed([RUN_TEST, "--cache", cache, *names])
    if output.splitlines()[-1:] != [f"{len(names)} passed, 0 failed, 0 skipped"]:
        raise SystemExit(f"run_test.py did not pass the same tests:\n{output}")
    return seconds


def compare(files: Sequence[str]) -> list[Target]:
    theirs = []
    for file in files:
        print(f"on PyTorch's classes: {file} ...", end=" ", flush=True)
        theirs.append(run_on_pytorch(file))
        last = theirs[-1]
        print(f"{len(last.passed)} passed in {last.seconds:.0f} s, {last.others} left out")
    usable = [one for one in theirs if one.passed]
    if not usable:
        raise SystemExit("nothing to compare: no test of these files passes on PyTorch's classes")
    uncompiled = [one for one in usable if not one.file.endswith(COMPILES)]
    lines = [(one.file.removeprefix(f"{SUITES}/"), [one]) for one in usable]
    lines += [("all files", usable), ("files that do not compile", uncompiled)]
    print(f"\n{'':<52}{'tests':>6}{'PyTorch':>10}{'ours':>9}{'ratio':>8}")
    ratio = 0.0
    for label, runs in lines:
        names = [name for one in runs for name in one.passed]
        if names:
            peer, ours = sum(one.seconds for one in runs), seconds_by_run_test(names)
            ratio = peer / ours
            print(f"{label:<52}{len(names):>6}{peer:>8.1f} s{ours:>7.1f} s{ratio:>8.1f}")
    title = "PyTorch's time / ours, files that do not compile"
    return [Target(title, ratio, MINIMUM_RATIO, at_least=True)] if uncompiled else []


# -- what run_test.py adds to a test

PLAIN = """
import unittest
class T(unittest.TestCase): pass
for n in range({tests}): setattr(T, f"test_{{n}}", lambda self: None)
if __name__ == "__main__": unittest.main()
"""
RANKS = """
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
class T(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
for n in range({tests}): setattr(T, f"test_{{n}}", lambda self: None)
if __name__ == "__main__": run_tests()
"""


def overhead(source: str, ranks: int, rounds: int, tests: int = 20) -> float:
    """Milliseconds that run_test.py adds to a test, compared with running the file directly.

    A test costs the difference between a file with many tests and a file with one, over the number of further tests.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        files = {count: directory / f"test_{count}.py" for count in (1, 1 + tests)}
        for count, file in files.items():
            file.write_text(source.format(tests=count))
        ways = {
            "directly": lambda file: [file],
            "with run_test.py": lambda file: [
                RUN_TEST,
                "--cache",
                directory / "cache",
                "-j",
                f"{ranks}",
                "--drop-in",
                file,
            ],
        }
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for way, command in ways.items():
                for count, file in files.items():
                    seconds.setdefault((way, count), []).append(timed(command(file))[0])
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    each = {way: (middle[way, 1 + tests] - middle[way, 1]) / tests * 1000 for way in ways}
    print("  " + "; ".join(f"{way} {ms:.0f} ms" for way, ms in each.items()))
    return each["with run_test.py"] - each["directly"]


def tiny_tests(rounds: int) -> float:
    """Milliseconds for each of many tiny tests of a file, on two CPU slots, each in a process of its own.

    The difference between a run of many and a run of one, over the number of further tests.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        seconds: dict[int, list[float]] = {1: [], 1 + MANY: []}
        for _ in range(rounds):
            for count, taken in seconds.items():
                file = directory / f"test_{count}.py"
                file.write_text(PLAIN.format(tests=count))
                taken.append(timed([RUN_TEST, "--cache", directory / "cache", "-q", "-j", "2", "--drop-in", file])[0])
    one, many = map(statistics.median, seconds.values())
    print(f"{MANY} tiny tests on 2 slots: {many:.1f} s, one: {one:.1f} s")
    return (many - one) / MANY * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="compare only two files, whose tests do not compile")
    parser.add_argument("--files", nargs="+", metavar="FILE", help=f"compare these files, given relative to {SUITES}")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measure the overhead per test N times (default: 5)"
    )
    options = parser.parse_args()
    everything = sorted(str(file.relative_to(ROOT)) for file in (ROOT / SUITES).rglob("test_*.py"))
    chosen = options.files or (QUICK if options.quick else None)
    files = [f"{SUITES}/{file}" for file in chosen] if chosen else everything

    targets = []
    for title, source, ranks in (("an empty test", PLAIN, 1), ("an empty test with 2 ranks", RANKS, 2)):
        print(f"{title}, in sequence:")
        added = overhead(source, ranks, options.rounds)
        targets.append(Target(f"{title}: run_test.py adds", added, MOST_OVERHEAD_MS, " ms"))
    targets.append(Target(f"each of {MANY} tiny tests on 2 slots", tiny_tests(options.rounds), MOST_TINY_MS, " ms"))
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}))
    targets += compare(files)
    print("\n" + "\n".join(map(str, targets)))
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
