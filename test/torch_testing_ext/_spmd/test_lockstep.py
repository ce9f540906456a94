"""Ranks whose programs part at a later call: an error on all ranks, and nothing changed, instead of a hang."""

from __future__ import annotations

import sys
import threading

import torch
from spmd_training import capture, normal_batch, whole
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


class Branching(nn.Module):
    """Two output layers, of which the second is used only if asked for."""

    def __init__(self, normed):
        super().__init__()
        self.first = nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.out, self.extra = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, branch):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.out(hidden) + (self.extra(hidden) if branch else 0)


def step(model, optimizer, batch, branch):
    optimizer.zero_grad()
    loss = (model(batch[0], branch) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def looking_step(model, optimizer, batch, look):
    loss = (model(batch[0], True) - batch[1]).pow(2).mean()
    if look and loss > 0:  # cannot be traced
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def accumulating_step(model, optimizer, batch, last):
    loss = (model(batch[0], True) - batch[1]).pow(2).mean()
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def updating_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0], True) - batch[1]).pow(2).mean()
    loss.backward()
    if len(batch[0]) > 3:
        optimizer.step()
    return loss


def dividing_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0], True) - batch[1]).pow(2).sum()
    loss.backward()
    for param in model.parameters():
        param.grad.div_(len(batch[0]))
    optimizer.step()
    return loss


def decaying_step(model, optimizer, batch):
    with torch.no_grad():
        if len(batch[0]) > 3:
            for param in model.parameters():
                param.mul_(0.5)


def evaluation(model, batch):
    with torch.no_grad():
        return (model(batch[0], True) - batch[1]).pow(2).mean()


# With tiny buckets, several collectives start before the first one is awaited. Batch norm begins with a broadcast,
# which has no room for the flag: it gets a collective of its own.
VARIANTS = {
    "replicate": ("replicate", False, 25),
    "replicate_tiny": ("replicate", False, 1e-6),
    "replicate_two_in_a_bucket": ("replicate", False, 2e-4),
    "replicate_normed": ("replicate", True, 25),
    "fully_shard": ("fully_shard", False, 25),
    "fully_shard_two_in_a_bucket": ("fully_shard", False, 2e-4),
}


class Lockstep(DTensorTestBase):
    """The base of tests with one model and several steps."""

    def _start(self, variant):
        style, normed, bucket_mb = VARIANTS[variant]
        torch.manual_seed(self.rank)
        self.model = Branching(normed).to(self.device_type)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.mode = DataParallel(style, bucket_mb=bucket_mb)
        self.step = capture(parallel_mode=self.mode)(step)
        self.calls = 0

    def _batch(self):
        self.calls += 1
        return tuple(part.to(self.device_type) for part in normal_batch(6, 10)(self.rank, self.calls))

    def _sized(self, *sizes):
        return tuple(part[: sizes[self.rank]] for part in self._batch())

    def _weights(self):
        return [whole(value).clone() for value in (*self.model.parameters(), *self.model.buffers())]

    def _refused(self, call, *fragments, error=SPMDError):
        before = self._weights()
        with self.assertRaises(error) as caught:
            call()
        for fragment in fragments:
            self.assertIn(fragment, str(caught.exception))
        self.assertEqual(before, self._weights(), rtol=0, atol=0, msg=f"after: {caught.exception}")


class TestLockstep(Lockstep):
    """Two ranks that part, and go on together."""

    @property
    def world_size(self):
        return 2

    @parametrize("variant", list(VARIANTS))
    @with_comms
    def test_branches(self, variant):
        self._start(variant)
        for _ in range(3):
            self.step(self.model, self.optimizer, self._batch(), True)
        for branching_rank in (0, 1):
            self._refused(
                lambda rank=branching_rank: self.step(self.model, self.optimizer, self._batch(), self.rank == rank),
                "differ in their collectives",
                "extra.",
                "same branch on every rank",
            )
        for branch in (True, False, True, False, False):  # all ranks change together
            self.step(self.model, self.optimizer, self._batch(), branch)

    @parametrize("variant", ["replicate", "fully_shard", "replicate_normed"])
    @with_comms
    def test_later_trace_fails_on_one_rank(self, variant):
        self._start(variant)
        looking = capture(parallel_mode=self.mode)(looking_step)
        self.step(self.model, self.optimizer, self._batch(), True)
        mine, theirs = "data-dependent control flow", "Rank 1 could not compile the step"
        expected = mine if self.rank == 1 else theirs
        # In the first call of a step, and in a later one.
        self._refused(lambda: looking(self.model, self.optimizer, self._batch(), self.rank == 1), expected)
        looking(self.model, self.optimizer, self._batch(), False)
        looking(self.model, self.optimizer, self._batch(), False)
        self._refused(lambda: looking(self.model, self.optimizer, self._batch(), self.rank == 1), expected)
        # An error of the user's code, and of the arguments' check.
        x, y = self._batch()
        self._refused(
            lambda: looking(self.model, self.optimizer, (x, y[:, : 4 - self.rank]), False),
            "" if self.rank == 1 else theirs,
            error=(RuntimeError, SPMDError),
        )
        self._refused(
            lambda: looking(self.model, self.optimizer, (x.requires_grad_(self.rank == 1), y), False),
            "requires a gradient" if self.rank == 1 else theirs,
        )
        looking(self.model, self.optimizer, self._batch(), False)

    @parametrize("variant", ["replicate", "fully_shard"])
    @with_comms
    def test_different_steps(self, variant):
        self._start(variant)
        looking = capture(parallel_mode=self.mode)(looking_step)
        self.step(self.model, self.optimizer, self._batch(), False)
        looking(self.model, self.optimizer, self._batch(), False)
        mine = looking if self.rank == 1 else self.step
        self._refused(lambda: mine(self.model, self.optimizer, self._batch(), False), "differ in their collectives")
        other = capture(parallel_mode=self.mode)(step) if self.rank == 1 else looking
        model = Branching(False).to(self.device_type) if self.rank == 1 else self.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if self.rank == 1 else self.optimizer
        self._refused(lambda: other(model, optimizer, self._batch(), False), "first call", "later call")
        for _ in range(2):  # in turns, as for a GAN
            self.step(self.model, self.optimizer, self._batch(), False)
            looking(self.model, self.optimizer, self._batch(), False)

    @parametrize("variant", ["replicate", "replicate_normed", "fully_shard"])
    @parametrize("later", [False, True])
    @parametrize("body", [updating_step, dividing_step])
    @with_comms
    def test_sizes_that_lead_to_other_updates(self, body, later, variant):
        self._start(variant)
        each = capture(parallel_mode=self.mode)(body)
        sizes = [(4, 4), (6, 6)] if later else []
        for size in sizes:
            each(self.model, self.optimizer, self._sized(*size))
        self._refused(
            lambda: each(self.model, self.optimizer, self._sized(3, 5)),
            "The ranks differ in their updates",
            "computed by",
        )
        each(self.model, self.optimizer, self._sized(5, 5))

    @parametrize("variant", ["replicate", "fully_shard"])
    @with_comms
    def test_updates_without_collectives(self, variant):
        self._start(variant)
        decaying = capture(parallel_mode=self.mode)(decaying_step)
        self._refused(lambda: decaying(self.model, self.optimizer, self._sized(3, 5)), "The ranks differ in their")
        decaying(self.model, self.optimizer, self._sized(4, 5))  # after which the ranks have the same weights
        before = self._weights()
        decaying(self.model, self.optimizer, self._sized(5, 4))
        self.assertEqual([0.5 * weight for weight in before], self._weights())

    @parametrize("variant", ["replicate", "fully_shard"])
    @with_comms
    def test_sizes_that_lead_to_the_same_updates(self, variant):
        self._start(variant)
        each = capture(parallel_mode=self.mode)(step)
        for size in [(4, 6), (1, 6), (6, 1), (1, 1)]:
            each(self.model, self.optimizer, self._sized(*size), True)

    @parametrize("variant", ["replicate", "fully_shard"])
    @with_comms
    def test_stacks_of_one_rank_are_sampled(self, variant):
        """A sampler holds the frames of this thread, and so gradients, which autograd copies then."""
        self._start(variant)
        done = threading.Event()

        def sample():
            while not done.is_set():
                held = sys._current_frames()
                done.wait(0.0005)
                del held

        thread = threading.Thread(target=sample)
        if self.rank == 1:
            thread.start()
        try:
            for body in (step, accumulating_step):
                each = capture(parallel_mode=self.mode)(body)
                for branch in (False, True):
                    each(self.model, self.optimizer, self._batch(), branch)
        finally:
            done.set()
            if self.rank == 1:
                thread.join()

    @with_comms
    def test_no_agreement_during_accumulation(self):
        self._start("replicate")
        each = capture(parallel_mode=self.mode, verify="off")(accumulating_step)
        for i in range(12):
            each(self.model, self.optimizer, self._batch(), i % 4 == 3)
        lockstep, changes = each.last.lockstep, []
        lockstep.change = changes.append
        for i in range(8):
            each(self.model, self.optimizer, self._batch(), i % 4 == 3)
        self.assertEqual(changes, [])

    @with_comms
    def test_first_call_fails_before_its_trace(self):
        self._start("replicate")
        x, y = self._batch()
        with self.assertRaisesRegex(SPMDError, "requires a gradient" if self.rank == 1 else "Rank 1 could not compile"):
            self.step(self.model, self.optimizer, (x.requires_grad_(self.rank == 1), y), True)
        self.step(self.model, self.optimizer, (x.detach(), y), True)

    @with_comms
    def test_programs_without_collectives_may_differ_in_number(self):
        self._start("replicate")
        evaluate = capture(parallel_mode=self.mode)(evaluation)
        for i in range(3):
            self.step(self.model, self.optimizer, self._batch(), True)
            for _ in range(1 + self.rank + i):
                evaluate(self.model, self._batch())

    @with_comms
    def test_no_agreement_while_programs_repeat(self):
        self._start("replicate")
        looking = capture(parallel_mode=self.mode)(looking_step)
        for _ in range(3):
            self.step(self.model, self.optimizer, self._batch(), False)
            looking(self.model, self.optimizer, self._batch(), False)
        lockstep, changes = self.step.last.lockstep, []
        lockstep.change = changes.append
        for _ in range(3):
            self.step(self.model, self.optimizer, self._batch(), False)
            looking(self.model, self.optimizer, self._batch(), False)
        self.assertEqual(changes, [])


class TestLockstepOfFour(Lockstep):
    """One of four ranks parts."""

    @property
    def world_size(self):
        return 4

    @parametrize("variant", ["replicate", "fully_shard_two_in_a_bucket"])
    @with_comms
    def test_branches(self, variant):
        self._start(variant)
        for _ in range(2):
            self.step(self.model, self.optimizer, self._batch(), True)
        self._refused(
            lambda: self.step(self.model, self.optimizer, self._batch(), self.rank != 2), "differ in their collectives"
        )
        self.step(self.model, self.optimizer, self._batch(), False)


instantiate_parametrized_tests(TestLockstep)
instantiate_parametrized_tests(TestLockstepOfFour)

if __name__ == "__main__":
    run_tests()
