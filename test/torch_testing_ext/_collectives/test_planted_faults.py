"""Each planted fault in every kind of rank: what the test's message says, and that no time-out is needed for it."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.planted_ranks import WORLD_SIZE, FaultCase, Fresh, Persistent, Threaded, body_for
from planted import FAULTS

from torch_testing_ext._testing.bases.rank_verdicts import RankFailure
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.ranks import spawn


class FaultyFresh(Fresh):
    pass


class FaultyPersistent(Persistent):
    pass


class FaultyThreaded(Threaded):
    pass


BASES = {"fresh": FaultyFresh, "persistent": FaultyPersistent, "threaded": FaultyThreaded}
for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        setattr(BASES[_base], _name, body_for(_base, _fault))


def in_a_function(rank):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))


class PlantedFaultTest(FaultCase):
    def check(self, name, base):
        self.assert_found(FAULTS[name], BASES[base](name))

    @pytest.mark.slow
    def test_in_new_interpreters(self):
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_START="spawn"):
            self.check("dtype_of_all_reduce", "fresh")

    def test_in_a_function(self):
        with self.assertRaisesRegex(RankFailure, "rank 1 calls all_reduce .4. int32, the others call all_reduce"):
            spawn(in_a_function, WORLD_SIZE)


for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        setattr(PlantedFaultTest, f"test_{_name}_{_base}", lambda self, name=_name, base=_base: self.check(name, base))


if __name__ == "__main__":
    run_tests()
