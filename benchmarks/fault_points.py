"""Have each fault happen at each kind of point, many times, and count the runs in which it did not, or elsewhere.

    python benchmarks/fault_points.py [--runs N] [--only TEXT] [--busy] [--quick]

Each fault, at each phase of each operation, and at steps, stores and marks: the subject and the check are those of
test/torch_testing_ext/test_expected_faults.py. As many run at once as there are cores. --busy adds a process for each
core that only computes; --quick takes SIGKILL for all points, and the other faults for all_reduce. Then it measures
what an import of `fault_points` and a call of its functions cost outside of tests. The exit code is 1 if a run missed,
or if an import or a call takes too long.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "test" / "torch_testing_ext"
LONGEST_IMPORT, LONGEST_CALL = 1e-3, 100e-9
ROUNDS = 5
# Of the subject's group.
GROUP_TIMEOUT = 5.0

# In a new interpreter: what an import costs more than that of an empty module in an empty package, and a call.
COST = """
import sys, tempfile, time, timeit
from pathlib import Path
def measured(name):
    began = time.process_time()
    module = __import__(name, fromlist=["fault_point"])
    return time.process_time() - began, module
with tempfile.TemporaryDirectory() as folder:
    for name in ("first", "empty"):
        Path(folder, name).mkdir()
        for module in ("__init__.py", "module.py"):
            Path(folder, name, module).touch()
    sys.path.insert(0, folder)
    measured("first.module")
    empty, _ = measured("empty.module")
took, module = measured("torch_testing_ext.fault_points")
functions = module.fault_point, module.reached
print(took - empty, *(min(timeit.repeat("f('name')", globals={"f": f}, number=10000)) / 10000 for f in functions))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, metavar="N", help="runs of each combination")
    parser.add_argument("--only", default="", metavar="TEXT", help="combinations with this in their name")
    parser.add_argument("--busy", action="store_true", help="keep each core busy with something else, too")
    parser.add_argument("--quick", action="store_true", help="fewer combinations")
    options = parser.parse_args()
    names = [name for name in combinations(options.quick) if options.only in name]
    with contextlib.ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0)) if options.busy else 0):
            stack.enter_context(busy_process())
        missed = run_all(names, options.runs)
    return max(missed, cost())


def combinations(quick: bool) -> dict[str, tuple[Any, ...]]:
    """By name: the arguments of the check."""
    sys.path.insert(0, str(TESTS))
    import test_expected_faults as tests

    chosen: dict[str, tuple[Any, ...]] = {name: tuple(rest) for name, *rest in tests.cases()}
    if quick:
        return chosen
    for fault, (_, did) in tests.FAULTS.items():
        for op, point in tests.OPERATIONS.items():
            for phase, word in tests.WORDS.items():
                if phase != "during" or op not in (*tests.ONLY_SENDS, "monitored_barrier"):
                    told = f"{did} {word} {op}" + ("" if op in ("send", "recv") else " #2")
                    planned = tests.planned_at(fault, tests.call(2, op, phase=phase))
                    chosen[f"{fault}_{phase}_{op}"] = planned, point, told
        for where, (at, point, what) in tests.OTHER_POINTS.items():
            chosen[f"{fault}_at_{where}"] = tests.planned_at(fault, at), point, f"{did} at {what}", False
            if where != "mark":
                planned = tests.planned_at(fault, replace(at, phase="after"))
                chosen[f"{fault}_after_{where}"] = planned, point, f"{did} after {what}", False
    return chosen


@contextlib.contextmanager
def busy_process() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_all(names: list[str], runs: int) -> int:
    """Run each combination so many times. Returns 1 if any missed."""
    # The one that takes longest by far imports the optimizers.
    context = multiprocessing.get_context("spawn")
    began, missed, late = time.monotonic(), 0, 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for name, misses, seconds in pool.map(run_one, names, [runs] * len(names)):
            missed += len(misses)
            late += sum(each > GROUP_TIMEOUT for each in seconds)
            print(
                f"{name}: {len(misses)} of {runs} missed; median {median(seconds):.2f} s, longest {max(seconds):.2f} s"
            )
            for text in misses[:3]:
                print("    " + text.replace("\n", "\n    "), flush=True)
    total = len(names) * runs
    took = time.monotonic() - began
    print(f"{len(names)} combinations, {total} runs in {took:.0f} s: {missed} missed")
    print(f"{late} took more than {GROUP_TIMEOUT:g} s: there, gloo did not notice the loss before the group's time-out")
    return int(missed > 0)


def run_one(name: str, runs: int) -> tuple[str, list[str], list[float]]:
    """Run one combination. Returns its name, what was wrong, and the seconds of each run."""
    arguments = combinations(quick=False)[name]
    import test_expected_faults as tests

    misses, seconds = [], []
    for _ in range(runs):
        began = time.monotonic()
        try:
            tests.EachPointTest("check").check(*arguments)
        except AssertionError as error:
            misses.append(str(error))
        seconds.append(time.monotonic() - began)
    return name, misses, seconds


def cost() -> int:
    """Print what `fault_points` costs outside of tests. Returns 1 if it is too much."""
    command = [sys.executable, "-c", COST]
    done = [subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True) for _ in range(ROUNDS)]
    costs = [tuple(map(float, each.stdout.split())) for each in done]
    import_s, *calls = (min(column) for column in zip(*costs, strict=True))
    print(f"import: {import_s * 1e3:.2f} ms (target: {LONGEST_IMPORT * 1e3:g} ms)")
    for name, seconds in zip(("fault_point", "reached"), calls, strict=True):
        print(f"{name}: {seconds * 1e9:.0f} ns (target: {LONGEST_CALL * 1e9:g} ns)")
    return int(import_s > LONGEST_IMPORT or max(calls) > LONGEST_CALL)


if __name__ == "__main__":
    sys.exit(main())
