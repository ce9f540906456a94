"""Ranks of every kind in which a fault is planted, and what is said about it."""

import unittest
from unittest import mock

import torch.distributed as dist

from kit.outcomes import AccountsResult
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase

WORLD_SIZE = 3


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


def in_fresh_ranks(body, backend="gloo"):
    def run(self):
        store = dist.FileStore(self.file_name, WORLD_SIZE)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=WORLD_SIZE)
        body(self)

    return run


def _wait_until_all_are_connected(rank):
    """Have no rank abort while another one is still in `init_process_group`: that one would make no call at all."""
    store = dist.distributed_c10d._get_default_store()
    names = [f"{rank.id()} of rank {number}" for number in range(WORLD_SIZE)]
    store.set(names[rank.rank], "connected")
    store.wait(names)


def body_for(base, fault, backend="gloo"):
    """A method of that base which commits the fault. `backend`: of fresh ranks."""

    def body(self):
        if base != "threaded":
            _wait_until_all_are_connected(self)
        fault.body(self)

    return in_fresh_ranks(body, backend) if base == "fresh" else body


def outcome_with_tear_down(test):
    result = AccountsResult()
    unittest.TestSuite([test]).run(result)  # with the tear-down of its class
    for outcome, entries in (("error", result.errors), ("failed", result.failures), ("skipped", result.skipped)):
        if entries:
            return outcome, entries[0][1]
    return "passed", ""


class FaultCase(unittest.TestCase):
    """Runs tests with planted faults, and looks at what is said about them."""

    def assert_found(self, fault, test):
        # The fault must be found long before. A wait that the time-out of gloo ends first, 1,800 s, is no deadlock.
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 1000.0):
            outcome, message = outcome_with_tear_down(test)
        self.assertEqual(outcome, fault.outcome, message)
        self.assertNotIn("timed out after", message)
        at = 0
        for text in fault.texts:
            found = message.find(text, at)
            self.assertGreaterEqual(found, 0, f"{text!r} is not, or not in this order, in:\n{message}")
            at = found + len(text)
