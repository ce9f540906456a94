"""Run test files of PyTorch before and after a patch of our series, in turns, and compare test by test.

    python benchmarks/patched.py --pytorch CHECKOUT [--patch NAME] [--rounds N] [--output FILE] [FILE ...]

Each FILE is a path below the checkout's test/; without one, those of FILES run. The rounds alternate in which side
runs first. Both sides use a copy of the installed torch; pytest runs the files, without plugins. The exit code is 1 if
the outcome of a test differs between the two sides.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from launch import cpu_of_children

from torch_testing_ext._process import system

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "patches"))

import patch_series  # noqa: E402
import torch_environments as environments  # noqa: E402

# Files whose tests start ranks and need no accelerator. They are those of torch 2.4: newer ones have moved.
FILES = (
    "distributed/_composable/test_replicate.py",
    "distributed/_tensor/test_api.py",
    "distributed/_tensor/test_experimental_ops.py",
    "distributed/_tensor/test_init.py",
    "distributed/_tensor/test_optimizers.py",
    "distributed/algorithms/test_join.py",
    "distributed/checkpoint/test_format_utils.py",
    "distributed/tensor/parallel/test_parallelize_api.py",
    "distributed/test_c10d_logger.py",
    "distributed/test_c10d_object_collectives.py",
    "distributed/test_c10d_spawn_gloo.py",
    "distributed/test_collective_utils.py",
)
TIMEOUT = 1500.0
Outcomes = dict[str, str]  # by test


class Run(NamedTuple):
    """One run of a file on one side: its duration, and the CPU time of all its processes."""

    seconds: float
    cpu: float
    outcomes: Outcomes


def run(file: Path, torch: Path, words: Sequence[str] = (), limit: float = TIMEOUT) -> Run:
    """Run a file with a torch by pytest, or by other words of Python's command line, within a limit."""
    with tempfile.TemporaryDirectory(prefix="patched") as temporary:
        report = Path(temporary, "report.xml")
        by_pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "--rootdir", str(file.parent))
        environment = {
            **os.environ,
            "PYTHONPATH": str(torch),
            "PYTORCH_TEST_START_METHOD": "forkserver",  # read only with the patch start-method
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": temporary,
        }
        started, cpu = time.monotonic(), cpu_of_children()
        done = subprocess.run(
            [sys.executable, *(words or by_pytest), str(file), f"--junitxml={report}"],
            cwd=file.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        seconds = time.monotonic() - started
        with suppress(ChildProcessError):
            while True:  # the fork server, which outlives its parent for a moment
                os.waitpid(-1, 0)
        if not report.exists():
            raise SystemExit(f"{file} has no report:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return Run(seconds, cpu_of_children() - cpu, outcomes_of(report))


def outcomes_of(report: Path) -> Outcomes:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = [f"{child.tag}: {child.get('message')}" for child in case if child.tag == "skipped"]
        ended += [child.tag for child in case if child.tag in ("failure", "error")]
        if any(child.get("type") == "pytest.xfail" for child in case):
            ended = ["expected failure"]
        found[f"{case.get('classname')}.{case.get('name')}"] = " and ".join(ended) or "passed"
    return found


def line_of(file: str, before: Sequence[Run], after: Sequence[Run]) -> tuple[str, float, list[str]]:
    """The row of the table, how many times faster the file is, and the tests that differ."""
    seen = [
        {test: {run.outcomes.get(test) for run in side} for test in tests_of(before, after)} for side in (before, after)
    ]
    differ = [
        f"{file}: {test}: {seen[0][test]} before, {seen[1][test]} after"
        for test in seen[0]
        if seen[0][test] != seen[1][test]
    ]
    slow, fast = (statistics.median(run.seconds for run in side) for side in (before, after))
    most, least = (statistics.median(run.cpu for run in side) for side in (before, after))
    counts = Counter(outcome.partition(":")[0] for outcome in after[0].outcomes.values())
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    cells = file, outcomes, f"{slow:.0f}", f"{fast:.0f}", f"{slow / fast:.1f}", f"{most:.0f}", f"{least:.0f}"
    return f"| {' | '.join(cells)} |", slow / fast, differ


def tests_of(before: Sequence[Run], after: Sequence[Run]) -> list[str]:
    return sorted({test for run in (*before, *after) for test in run.outcomes})


def table(results: Mapping[str, Mapping[str, Sequence[Run]]]) -> int:
    print("| file | outcomes | before, s | after, s | times faster | CPU before, s | CPU after, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    factors, differences = [], []
    for file, sides in results.items():
        row, factor, differ = line_of(file, sides["before"], sides["after"])
        print(row)
        factors.append(factor)
        differences += differ
    print(f"\n{len(factors)} files, {statistics.median(factors):.1f} times faster in the median")
    print("\n".join(differences) or "all outcomes are equal")
    return 1 if differences else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a checkout with test/")
    parser.add_argument(
        "--patch", default="start-method", metavar="NAME", help="a part of its name (default: start-method)"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="run each side N times (default: 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the results in FILE, and go on from it")
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"paths below test/ (default: {len(FILES)} files)")
    options = parser.parse_args(words)
    system.adopt_orphans()
    package = environments.this_environment().package
    version = environments.version_of(package)
    series = patch_series.load(ROOT / "patches", version)
    [patch] = [each for each in series if options.patch in each.file.name]
    kept = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    with ExitStack() as stack:
        torches = {
            side: stack.enter_context(patch_series.patched_torch([patch], package)) for side in ("before", "after")
        }
        torches["after"].apply(patch)
        for turn in range(options.rounds):
            for file in options.files or FILES:
                sides = kept.setdefault(file, {"before": [], "after": []})
                for side in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                    if len(sides[side]) <= turn:
                        sides[side].append(run(options.pytorch / "test" / file, torches[side].root))
                        print(f"round {turn + 1}, {side}: {file}: {sides[side][-1][0]:.1f} s", flush=True)
                        if options.output:
                            options.output.write_text(json.dumps(kept))
    print(f"\ntorch {version}, {patch.file.name}\n")
    return table(
        {file: {side: [Run(*one) for one in runs] for side, runs in sides.items()} for file, sides in kept.items()}
    )


if __name__ == "__main__":
    sys.exit(main())
