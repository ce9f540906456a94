"""Measure how long a suite takes: run_test.py against the same files, run in sequence on PyTorch's own base classes.

    python benchmarks/run.py [--quick] [--files FILE ...] [--rounds N]

run_on_pytorch.py replaces our classes with PyTorch's in our suites. The files of clients/ are written for PyTorch's
classes; run_test.py runs them with --drop-in. Both sides run the same tests: run_test.py gets exactly those that pass
on PyTorch's classes. PyTorch's time is the sum of these tests' times and their files' start-up times. The sides take
turns, file by file; run_test.py runs all files together at the end. The benchmark also measures what run_test.py adds
to a test, compared with running the file directly. The exit code is 1 if a target is missed. Ctrl-C ends everything
that the benchmark has started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import Target, with_bytecode

from torch_testing_ext._process import ends, system

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_TEST = ROOT / "run_test.py"
SUITES = "test/distributed"
CLIENTS = "benchmarks/clients"
COMPILES = "_composable/test_replicate_with_compiler.py"
QUICK = (
    f"{SUITES}/tensor/parallel/test_ddp_2d_parallel.py",
    f"{SUITES}/_spmd/test_data_parallel.py",
    f"{CLIENTS}/collectives.py",
)
MINIMUM_RATIO = 10.0
MOST_OVERHEAD_MS = 30.0
FEW, MANY = 200, 2000
MOST_TINY_MS = 20.0
MOST_GROWTH_KB = 10.0


@dataclass(frozen=True)
class PyTorchRun:
    """The outcome of a file that ran on PyTorch's classes."""

    file: str  # relative to the root
    passed: dict[str, float]  # seconds, by the name that run_test.py accepts
    others: int  # tests that did not pass
    startup: float  # seconds for interpreter and imports

    @property
    def seconds(self) -> float:
        return self.startup + sum(self.passed.values()) if self.passed else 0.0


def timed(command: Sequence[str | Path], extra_path: Sequence[str] = (), **more: str) -> tuple[float, str]:
    """Seconds that a command took, and its output. `more`: variables of its environment."""
    path = os.pathsep.join([*extra_path, str(ROOT)])
    environment = with_bytecode({**os.environ, "PYTHONPATH": path, **more})
    began = time.perf_counter()
    # In a session of its own: Ctrl-C reaches only this process, which ends the others.
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output = process.communicate()[0]
    return time.perf_counter() - began, output


def run_on_pytorch(file: str) -> PyTorchRun:
    with tempfile.TemporaryDirectory() as directory:
        # Every interpreter imports sitecustomize when it starts, including those of ranks.
        Path(directory, "sitecustomize.py").write_text((HERE / "run_on_pytorch.py").read_text())
        report = Path(directory, "report.xml")
        seconds, output = timed(
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file],
            extra_path=[directory],
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # or pytest finds modules of a package with a plugin by itself
        )
        if not report.exists():
            raise SystemExit(f"{file} does not run on PyTorch's classes:\n{output}")
        if (ours := Path(directory, "not-replaced")).exists():
            raise SystemExit(f"{file} ran on our own classes:\n{ours.read_text()}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    times = {case: float(case.get("time", "0")) for case in cases}
    passed = {_name(file, case): times[case] for case in cases if len(case) == 0}
    return PyTorchRun(file, passed, len(cases) - len(passed), seconds - sum(times.values()))


def _name(file: str, case: ElementTree.Element) -> str:
    return f"{file}::{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"


def seconds_by_run_test(runs: Sequence[PyTorchRun]) -> float:
    """Seconds that run_test.py takes for the tests of these files that have passed; exits unless all of them pass."""
    names = [name for one in runs for name in one.passed]
    if not names:
        return 0.0
    what, skipped = names, 0
    if runs[0].file.startswith(CLIENTS):  # whole files; what does not pass there is skipped on both sides
        what = [argument for one in runs for argument in ("--drop-in", one.file)]
        skipped = sum(one.others for one in runs)
    with tempfile.TemporaryDirectory() as cache:
        seconds, output = timed([RUN_TEST, "--cache", cache, *what])
    if output.splitlines()[-1:] != [f"{len(names)} passed, 0 failed, {skipped} skipped"]:
        raise SystemExit(f"run_test.py did not pass the same tests:\n{output}")
    return seconds


def compare(files: Sequence[str]) -> list[Target]:
    """File by file, in turns; then all files together, each kind by one run_test.py."""
    print(f"\n{'':<52}{'tests':>6}{'left out':>10}{'PyTorch':>10}{'ours':>9}{'ratio':>8}")
    theirs, alone = [], {}
    for file in files:
        theirs.append(run_on_pytorch(file))
        alone[file] = seconds_by_run_test(theirs[-1:])
        _print_line(file.removeprefix(f"{SUITES}/"), theirs[-1:], alone[file])
    uncompiled = [one for one in theirs if not one.file.endswith(COMPILES)]
    ratios = {
        title: _print_line(title, runs, sum(map(seconds_by_run_test, _by_kind(runs))))
        for title, runs in (("all files", theirs), ("files that do not compile", uncompiled))
        if any(one.passed for one in runs)
    }
    if not ratios:
        raise SystemExit("nothing to compare: no test of these files passes on PyTorch's classes")
    return [
        Target(f"PyTorch's time / ours, {title}", each, MINIMUM_RATIO, at_least=True) for title, each in ratios.items()
    ]


def _by_kind(runs: Sequence[PyTorchRun]) -> list[list[PyTorchRun]]:
    kinds = ([one for one in runs if one.file.startswith(CLIENTS) is clients] for clients in (False, True))
    return [kind for kind in kinds if kind]


def _print_line(title: str, runs: Sequence[PyTorchRun], ours: float) -> float:
    """Print and return PyTorch's time over ours."""
    tests, others = sum(len(one.passed) for one in runs), sum(one.others for one in runs)
    peer = sum(one.seconds for one in runs)
    ratio = peer / ours if ours else 0.0
    print(f"{title:<52}{tests:>6}{others:>10}{peer:>8.1f} s{ours:>7.1f} s{ratio:>8.1f}", flush=True)
    return ratio


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


def tiny_tests(rounds: int) -> list[Target]:
    """Milliseconds, and kilobytes of run_test.py, for each of many tiny tests of a file, on two CPU slots.

    Each test has a process of its own. A test costs the difference between a run of many and a run of few, over the
    number of further tests.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        files = {count: directory / f"test_{count}.py" for count in (FEW, MANY)}
        runs: dict[int, list[tuple[float, float]]] = {FEW: [], MANY: []}
        for _ in range(rounds):
            for count, file in files.items():
                file.write_text(PLAIN.format(tests=count))
                command = [RUN_TEST, "--cache", directory / "cache", "-q", "-j", "2", "--drop-in", file]
                runs[count].append(tiny_run(command))
    middle = {count: [statistics.median(column) for column in zip(*each, strict=True)] for count, each in runs.items()}
    for count, (seconds, size) in middle.items():
        print(f"{count} tiny tests on 2 slots: {seconds:.1f} s, at most {size / 1000:.0f} MB in run_test.py")
    longer, larger = ((many - few) / (MANY - FEW) for few, many in zip(middle[FEW], middle[MANY], strict=True))
    return [
        Target(f"each of {MANY} tiny tests on 2 slots", 1000 * longer, MOST_TINY_MS, " ms"),
        Target("the same: memory of run_test.py", larger, MOST_GROWTH_KB, " kB"),
    ]


def tiny_run(command: Sequence[str | Path]) -> tuple[float, float]:
    """Seconds that run_test.py took, and the most kilobytes that its own process had."""
    script = (
        "import resource, runpy, sys\n"
        "try: runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
        "finally: print('kB:', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    seconds, output = timed(["-c", script, *command])
    return seconds, float(output.rpartition("kB:")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="compare only three files, whose tests do not compile")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="compare these files, given relative to the root")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measure the overhead per test N times (default: 5)"
    )
    options = parser.parse_args()
    everything = [*(ROOT / SUITES).rglob("test_*.py"), *(ROOT / CLIENTS).glob("*.py")]
    files = options.files or (QUICK if options.quick else sorted(str(file.relative_to(ROOT)) for file in everything))

    targets = []
    for title, source, ranks in (("an empty test", PLAIN, 1), ("an empty test with 2 ranks", RANKS, 2)):
        print(f"{title}, in sequence:")
        added = overhead(source, ranks, options.rounds)
        targets.append(Target(f"{title}: run_test.py adds", added, MOST_OVERHEAD_MS, " ms"))
    targets += tiny_tests(max(1, options.rounds // 2))
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}))
    targets += compare(files)
    print("\n" + "\n".join(map(str, targets)))
    return 0 if all(target.reached for target in targets) else 1


def run() -> int:
    """Main, with an end for everything that it has started: PyTorch's ranks outlive a parent that is killed."""
    system.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        ends.end_children()


if __name__ == "__main__":
    sys.exit(run())
