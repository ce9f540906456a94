"""What a rank of a DTensor test saves if its fork server has learnt the shapes of operators' results.

    python benchmarks/dtensor.py [--rounds N]

The same transformer test runs with and without in turns. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
import unittest
from pathlib import Path

SUITE = Path(__file__).parents[1] / "test/distributed/tensor/parallel/test_tp_examples.py"
TESTS = ["test_transformer_training_is_seq_parallel_True_float32", "test_transformer_req_grad_float64_thaw_all"]
MOST = 0.5
AS_NEW, LEARNT = "as in a new process", "learnt"


def load_suite():
    spec = importlib.util.spec_from_file_location("suite", SUITE)
    module = sys.modules["suite"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DistTensorParallelExampleTest


def measured(test):
    """The test, which knows nothing in advance if AS_NEW is wanted, and writes what CPU time its rank took."""

    @functools.wraps(test)
    def run(self):
        from torch_testing_ext._torch import output_shapes

        if os.environ["WANTED"] == AS_NEW:
            output_shapes._known.clear()
        test(self)
        used = resource.getrusage(resource.RUSAGE_SELF)
        assert bool(output_shapes._known) == (os.environ["WANTED"] == LEARNT), "what was learnt does not hold"
        with open(os.environ["TIMES"], "a") as file:
            file.write(f"{used.ru_utime + used.ru_stime}\n")

    return run


def run_once(subject, name: str, wanted: str) -> tuple[float, float]:
    """The median CPU time of a rank, and the wall time of the test."""
    with tempfile.NamedTemporaryFile("r") as times:
        os.environ.update(WANTED=wanted, TIMES=times.name)
        result = unittest.TestResult()
        began = time.perf_counter()
        subject(name).run(result)
        wall = time.perf_counter() - began
        assert result.wasSuccessful() and not result.skipped, [*result.errors, *result.failures, *result.skipped]
        return statistics.median(float(line) for line in times), wall


def learn(subject, name: str) -> None:
    """Run the test once, and have the fork server learn what its ranks had to work out."""
    from torch_testing_ext import launch
    from torch_testing_ext.launch.protocol import Preload

    run_once(subject, name, AS_NEW)
    launch.client.launcher().server.send(Preload(launch.preload_hints(), at_once=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="how often each candidate runs")
    rounds = parser.parse_args().rounds
    suite = load_suite()
    subject = type("Subject", (suite,), {name: measured(getattr(suite, name)) for name in TESTS})
    missed = False
    for name in TESTS:
        learn(subject, name)
        found = {wanted: [] for wanted in (AS_NEW, LEARNT)}
        for _ in range(rounds):
            for wanted, each in found.items():
                each.append(run_once(subject, name, wanted))
        print(f"\n{name}\n\n| | {AS_NEW} | {LEARNT} | ratio | target |\n| --- | --- | --- | --- | --- |")
        for index, (what, most) in enumerate((("CPU time of a rank", MOST), ("wall time of the test", None))):
            new, learnt = (statistics.median(one[index] for one in found[wanted]) for wanted in (AS_NEW, LEARNT))
            target = "none" if most is None else f"{most} at most" + " (missed)" * (learnt > most * new)
            missed |= target.endswith("(missed)")
            print(f"| {what} | {new * 1000:.0f} ms | {learnt * 1000:.0f} ms | {learnt / new:.2f} | {target} |")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
