"""What ranks leave out, and nobody misses: a warning, and no harm to the next test of these ranks."""

import contextlib
import io
import unittest

import torch
import torch.distributed as dist
from kit.planted_ranks import Fresh, Persistent, in_fresh_ranks, outcome_with_tear_down

from torch_testing_ext.common_distributed import collectives_may_differ
from torch_testing_ext.common_utils import run_tests


def async_broadcast_of_the_root(self):
    dist.barrier()
    if self.rank == 0:
        self.work = dist.broadcast(torch.full((4,), 7.0), 0, async_op=True)


def async_all_reduce_of_one_rank(self):
    # The work ends with an error when the others end.
    store = dist.distributed_c10d._get_default_store()
    if self.rank == 1:
        self.work = dist.all_reduce(torch.ones(4), async_op=True)
        store.set(f"{self.id()} has issued", "")
    else:
        store.wait([f"{self.id()} has issued"])


def error_that_is_expected(self):
    """Of the arguments: rank 0 issues nothing."""
    if self.rank == 0:
        with self.assertRaises((TypeError, ValueError, RuntimeError)):
            dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], [1, 1, 5])
    elif self.rank == 1:
        self.work = dist.all_reduce(torch.ones(4), async_op=True)


def message_that_nobody_receives(self):
    if self.rank == 0:
        self.work = dist.isend(torch.ones(4), 1)
    dist.barrier()  # else rank 1 may have ended before, which fails the send


# -- errors that a rank swallows


def swallows(call):
    """A test in which rank 0 swallows the error of this call, which the others leave out."""

    def body(self):
        if self.rank == 0:
            try:
                call()
            except RuntimeError as error:
                # Not to the terminal, which the test reads.
                self.assertTrue(str(error))

    return body


SWALLOWED = {
    "a_receive": lambda: dist.recv(torch.ones(4), 1),
    "a_receive_of_objects": lambda: dist.recv_object_list([None], 1),
    "a_send": lambda: dist.send(torch.ones(4), 1),
    "a_barrier": lambda: dist.barrier(),
    "a_monitored_barrier": lambda: dist.monitored_barrier(),
    "objects": lambda: dist.all_gather_object([None] * 3, 1),
}


def send_without_the_group(self):
    """By its backend, which we do not see."""
    if self.rank == 0:
        group = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cpu")).send([torch.ones(4)], 1, 0).wait()
    elif self.rank == 1:
        dist.recv(torch.ones(4), 0)


class Alone(Fresh):
    message_that_nobody_receives = in_fresh_ranks(message_that_nobody_receives)
    send_without_the_group = in_fresh_ranks(send_without_the_group)
    async_broadcast_of_the_root = in_fresh_ranks(async_broadcast_of_the_root)
    async_all_reduce_of_one_rank = in_fresh_ranks(async_all_reduce_of_one_rank)
    error_that_is_expected = in_fresh_ranks(error_that_is_expected)

    @collectives_may_differ("tests the decorator")
    def on_purpose(self):
        in_fresh_ranks(async_broadcast_of_the_root)(self)


for _name, _call in SWALLOWED.items():
    setattr(Alone, _name, in_fresh_ranks(swallows(_call)))


class InTurn(Persistent):
    message_that_nobody_receives = message_that_nobody_receives
    async_broadcast_of_the_root = async_broadcast_of_the_root
    async_all_reduce_of_one_rank = async_all_reduce_of_one_rank

    def dtype(self):
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if self.rank else torch.float32))

    def next_one(self):
        if self.rank == 0:
            dist.send(torch.ones(4), 1)
        elif self.rank == 1:
            received = torch.zeros(4)
            dist.recv(received, 0)
            self.assertEqual(received, torch.ones(4))
        mine = torch.full((4,), float(self.rank))
        dist.broadcast(mine, 0)
        self.assertEqual(mine, torch.zeros(4))
        dist.all_reduce(mine)
        self.assertEqual(mine, torch.zeros(4))


class LeftOverTest(unittest.TestCase):
    def run_quietly(self, test):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            outcome, message = outcome_with_tear_down(test)
        return outcome, message, said.getvalue()

    def test_a_warning(self):
        for name, text in (
            ("async_broadcast_of_the_root", "ranks 1, 2 left before broadcast #2, which rank 0 issued"),
            ("async_all_reduce_of_one_rank", "ranks 0, 2 left before all_reduce #1, which rank 1 issued"),
            ("message_that_nobody_receives", "nobody received rank 0's send #1 to rank 1 [4]"),
        ):
            with self.subTest(name):
                outcome, message, said = self.run_quietly(Alone(name))
                self.assertEqual(outcome, "passed", message)
                self.assertIn(text, said)
                self.assertIn("test_left_over.py:", said)

    def test_no_warning(self):
        """Neither where nothing is left out, nor where something has raised: the test may expect that."""
        for name in ("error_that_is_expected", "on_purpose", "send_without_the_group", *SWALLOWED):
            with self.subTest(name):
                self.assertEqual(self.run_quietly(Alone(name)), ("passed", "", ""))

    def test_persistent_ranks_that_are_not_in_step_are_replaced(self):
        for name, count in (
            ("async_broadcast_of_the_root", 0),
            ("async_all_reduce_of_one_rank", 0),
            ("message_that_nobody_receives", 0),
            ("dtype", 1),
        ):
            with self.subTest(name):
                result = unittest.TestResult()
                with contextlib.redirect_stderr(io.StringIO()):
                    unittest.TestSuite([InTurn(name), InTurn("next_one")]).run(result)
                self.assertEqual(len(result.failures + result.errors), count, result.failures + result.errors)
                self.assertEqual(result.testsRun, 2)
                self.assertNotIn("next_one", [test._testMethodName for test, _ in result.failures + result.errors])


if __name__ == "__main__":
    run_tests()
