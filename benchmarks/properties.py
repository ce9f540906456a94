"""How many examples a second a property runs at in ranks, against the same collective without Hypothesis.

    python benchmarks/properties.py [ranks] [examples]

Both are measured in the same ranks: first a plain loop of the collective, then the property around it.
"""

import sys
import time

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import given, settings

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
EXAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 1000


class Properties(MultiProcessTestCase):
    world_size = RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _join_processes(self, fn):
        super()._join_processes(fn)
        with open(f"{self.file_name}.result") as file:
            print(file.read(), end="")

    def reduce(self, values):
        total = torch.tensor(values, dtype=torch.float32)
        dist.all_reduce(total)
        assert total.tolist() == [value * self.world_size for value in values]

    @settings(max_examples=EXAMPLES, database=None, derandomize=True)
    @given(values=st.lists(st.integers(0, 1000), max_size=8))
    def all_reduce(self, values):
        self.examples = getattr(self, "examples", 0) + 1
        self.reduce(values)

    def test_all_reduce(self):
        began, used = time.perf_counter(), time.process_time()
        self.all_reduce()
        took, used = time.perf_counter() - began, time.process_time() - used
        began = time.perf_counter()
        for _ in range(self.examples):
            self.reduce([1, 2, 3])
        plain = time.perf_counter() - began
        if self.rank == 0:
            rate = self.examples / took
            with open(f"{self.file_name}.result", "w") as file:
                file.write(f"{self.world_size} ranks, {self.examples} examples: {rate:.0f} examples a second, ")
                file.write(f"{took / plain:.1f} times the bare collective; ")
                file.write(f"{1000 * used / self.examples:.2f} ms of CPU an example in rank 0\n")


if __name__ == "__main__":
    run_tests(sys.argv[:1])
