"""Each planted fault in every kind of rank: what the test's message says, and that no time-out is needed for it."""

import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import AccountsResult
from planted import FAULTS, WORLD_SIZE

from torch_testing_ext._cases import ranked
from torch_testing_ext._cases.verdicts import RankFailure
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.ranks import spawn


class Fresh(MultiProcessTestCase):
    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class Persistent(MultiProcContinuousTest):
    world_size = WORLD_SIZE


class Threaded(MultiThreadedTestCase):
    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()


def _in_fresh_ranks(body):
    def run(self):
        store = dist.FileStore(self.file_name, WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD_SIZE)
        body(self)

    return run


def _wait_until_all_are_connected(rank):
    """Have no rank abort while another one is still in `init_process_group`: that one would make no call at all."""
    store = dist.distributed_c10d._get_default_store()
    names = [f"{rank.id()} of rank {number}" for number in range(WORLD_SIZE)]
    store.set(names[rank.rank], "connected")
    store.wait(names)


def body_for(base, fault):
    """A method of that base which commits the fault."""

    def body(self):
        if base != "threaded":
            _wait_until_all_are_connected(self)
        fault.body(self)

    return _in_fresh_ranks(body) if base == "fresh" else body


BASES = {"fresh": Fresh, "persistent": Persistent, "threaded": Threaded}
for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        setattr(BASES[_base], _name, body_for(_base, _fault))


def _outcome_of(test):
    result = AccountsResult()
    unittest.TestSuite([test]).run(result)  # with the tear-down of its class
    for outcome, entries in (("error", result.errors), ("failed", result.failures), ("skipped", result.skipped)):
        if entries:
            return outcome, entries[0][1]
    return "passed", ""


def in_a_function(rank):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))


class FaultCase(unittest.TestCase):
    """Runs tests with planted faults, and looks at what is said about them."""

    def assert_found(self, fault, test):
        # The fault must be found long before. A wait that the time-out of gloo ends first, 1,800 s, is no deadlock.
        with mock.patch.object(ranked, "TIMEOUT_DEFAULT", 1000.0):
            outcome, message = _outcome_of(test)
        self.assertEqual(outcome, fault.outcome, message)
        self.assertNotIn("timed out after", message)
        at = 0
        for text in fault.texts:
            found = message.find(text, at)
            self.assertGreaterEqual(found, 0, f"{text!r} is not, or not in this order, in:\n{message}")
            at = found + len(text)


class PlantedFaultTest(FaultCase):
    def check(self, name, base):
        self.assert_found(FAULTS[name], BASES[base](name))

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
