"""Measure how many examples a second a property of one all_reduce runs across ranks, compared with its parts.

    python benchmarks/properties.py [ranks] [examples]

The floor is the sum of the parts: the same collective in a plain loop in the same ranks, and Hypothesis alone in rank 0
with the same arguments. The three take turns, so that a busy machine slows down all of them. The exit code is 1 if the
target is missed; on a busy machine trust the CPU time.
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext import hypothesis_utils
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
EXAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
ROUNDS = 4
TARGET = 200  # examples per second, 4 ranks on 2 cores

SETTINGS = hypothesis_utils.settings(max_examples=EXAMPLES // ROUNDS, database=None, derandomize=True, deadline=None)
VALUES = st.lists(st.integers(0, 1000), max_size=8)


class Properties(MultiProcessTestCase):
    world_size = RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _join_processes(self, fn):
        super()._join_processes(fn)
        with open(f"{self.file_name}.result") as file:
            report(json.load(file))

    def reduce(self, values):
        total = torch.tensor(values, dtype=torch.float32)
        dist.all_reduce(total)
        assert total.tolist() == [value * self.world_size for value in values]

    @SETTINGS
    @hypothesis_utils.given(values=VALUES)
    def in_ranks(self, values):
        self.examples += 1
        self.reduce(values)

    def in_a_loop(self):
        for number in range(self.examples):
            self.reduce([number % 7, 2, 3])

    def test_all_reduce(self):
        measured = {"ours": [], "collective": [], "hypothesis": []}
        self.examples = 0
        self.in_ranks()
        for _ in range(ROUNDS):
            self.examples = 0
            measured["ours"].append(self.measure(self.in_ranks))
            measured["collective"].append(self.measure(self.in_a_loop))
            measured["hypothesis"].append(self.measure(hypothesis_alone if self.rank == 0 else str))
        if self.rank == 0:
            with open(f"{self.file_name}.result", "w") as file:
                json.dump(measured, file)

    def measure(self, run):
        """Return the wall time in rank 0 and the CPU time of all ranks, in milliseconds per example."""
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - began, torch.tensor([time.process_time() - used])
        dist.all_reduce(cpu)
        return 1000 * wall / self.examples, 1000 * cpu.item() / self.examples


@SETTINGS
@hypothesis_utils.given(values=VALUES)
def hypothesis_alone(values):
    pass


def report(measured):
    wall = {name: statistics.median(wall for wall, _ in rounds) for name, rounds in measured.items()}
    cpu = {name: statistics.median(cpu for _, cpu in rounds) for name, rounds in measured.items()}
    print(f"{RANKS} ranks; medians of {ROUNDS} rounds, in ms per example:")
    for name in wall:
        print(f"  {name:12} {wall[name]:6.2f} wall {cpu[name]:6.2f} CPU in all ranks")
    for kind, times in (("wall", wall), ("CPU", cpu)):
        floor = times["collective"] + times["hypothesis"]
        print(f"  ours is {times['ours'] / floor:.2f} times the floor in {kind} time")
    rate = 1000 / wall["ours"]
    print(f"  {rate:.0f} examples per second; target with 4 ranks: {TARGET}")
    assert RANKS != 4 or rate >= TARGET, "the target was missed"


if __name__ == "__main__":
    run_tests(sys.argv[:1])
