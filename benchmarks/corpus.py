"""Run PyTorch's own test files with PyTorch's classes and with ours by --drop-in, and compare test by test.

    python benchmarks/corpus.py --pytorch CHECKOUT [--record FILE] [--ours] [--limit SECONDS] [FILE ...]

Each FILE is a path below the checkout's test/; without one, those of FILES run. The sides take turns in which runs
first. `--record` keeps outcomes and seconds in FILE and goes on from there; with `--ours`, our side runs anew and is
compared with what was recorded of PyTorch's. The exit code is 1 if a test ends otherwise with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import patched

from torch_testing_ext._process import system
from torch_testing_ext.upstream.mapping import installed_torch

# Of torch 2.4, the last version of which a copy that can be had is whole. They need no accelerator.
FILES = (
    "distributed/_composable/test_contract.py",
    "distributed/_tensor/test_dtensor_ops.py",
    "distributed/argparse_util_test.py",
    "distributed/checkpoint/test_dedup_tensors.py",
    "distributed/checkpoint/test_format_utils.py",
    "distributed/checkpoint/test_nested_dict.py",
    "distributed/checkpoint/test_planner.py",
    "distributed/checkpoint/test_traverse.py",
    "distributed/checkpoint/test_utils.py",
    "distributed/elastic/events/lib_test.py",
    "distributed/elastic/metrics/api_test.py",
    "distributed/elastic/timer/api_test.py",
    "distributed/elastic/utils/util_test.py",
    "distributed/launcher/api_test.py",
    "distributed/test_c10d_logger.py",
    "distributed/test_c10d_pypg.py",
    "distributed/test_fake_pg.py",
    "distributed/test_multi_threaded_pg.py",
)
SIDES = ("PyTorch's", "ours")
# What stands for a whole file in the place of tests.
IMPORT, LIMIT = "(its import)", "(the time limit)"


class Run(NamedTuple):
    """One run of a file on one side. Outcomes by test."""

    seconds: float
    outcomes: dict[str, str]


def run(side: str, file: Path, limit: float) -> Run:
    """Run a file, and end all that it has started if it takes too long."""
    with tempfile.TemporaryDirectory(prefix="corpus") as cache:
        words = [str(patched.ROOT / "run_test.py"), f"--cache={cache}", "--drop-in"]
        try:
            seconds, _, outcomes = patched.run(file, installed_torch(), words if side == "ours" else (), limit)
        except subprocess.TimeoutExpired:
            for pid in system.descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return Run(limit, {LIMIT: "not ended"})
    return Run(seconds, {_key(test, file.stem): _kind(end) for test, end in outcomes.items()})


def _key(test: str, stem: str) -> str:
    """The class and the name of a test; the same words for each file that cannot be imported."""
    of_class = test.partition(f"{stem}.")[2]
    return IMPORT if not of_class or "/" in of_class else of_class


def _kind(end: str) -> str:
    """The outcome as a JUnit XML of torchtest has it, which counts an expected failure as passed."""
    kinds = {"failure": "failed", "error": "failed", "expected failure": "passed"}
    kind = re.split(":| and ", end)[0]
    return kinds.get(kind, kind)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a checkout with test/")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the results in FILE, and go on from it")
    parser.add_argument("--ours", action="store_true", help="run ours anew, and compare it with the record")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of a file (default: 900)")
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"paths below test/ (default: {len(FILES)} files)")
    options = parser.parse_args(words)
    system.adopt_orphans()
    record: Path | None = options.record
    kept: dict[str, dict[str, Run]] = {}
    if record and record.exists():
        for file, sides in json.loads(record.read_text()).items():
            kept[file] = {side: Run(*one) for side, one in sides.items()}
    chosen = options.files or FILES
    for number, file in enumerate(chosen):
        sides = kept.setdefault(file, {})
        if options.ours:
            sides.pop("ours", None)
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            if side not in sides:
                sides[side] = run(side, (options.pytorch / "test" / file).resolve(), options.limit)
                print(f"{side}: {file}: {sides[side].seconds:.1f} s", flush=True)
                if record:
                    record.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return table({file: kept[file] for file in chosen})


def table(results: Mapping[str, Mapping[str, Run]]) -> int:
    print("\n| file | with PyTorch's classes | ours | seconds | ours |\n| --- | --- | --- | --- | --- |")
    differ, same = [], 0
    for file, sides in results.items():
        theirs, ours = (sides[side] for side in SIDES)
        cells = [_counted(side.outcomes) for side in (theirs, ours)]
        print(f"| `{file}` | {cells[0]} | {cells[1]} | {theirs.seconds:.0f} | {ours.seconds:.0f} |")
        for test in sorted({*theirs.outcomes, *ours.outcomes}):
            pair = [side.outcomes.get(test, "not run") for side in (theirs, ours)]
            same += pair[0] == pair[1]
            if pair[0] != pair[1]:
                differ.append(f"{file}: {test}: {pair[0]} with PyTorch's classes, {pair[1]} with ours")
    print("\n".join([f"\n{same} tests end alike, {len(differ)} do not", *differ]))
    return 1 if differ else 0


def _counted(outcomes: Mapping[str, str]) -> str:
    if IMPORT in outcomes:
        return "does not import"
    counts = Counter(outcomes.values())
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
