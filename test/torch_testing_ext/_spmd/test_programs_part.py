"""Ranks whose programs part: an error on all ranks, and nothing changed, instead of a hang."""

from __future__ import annotations

import pytest
import torch
from spmd_training import capture, normal_batch, whole
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


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
    if look and loss > 0:  # cannot be recorded
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def updating_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0], True) - batch[1]).pow(2).mean()
    loss.backward()
    if len(batch[0]) > 3:
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


# With tiny buckets, several collectives start before the first one is awaited; with batch norm, a program changes
# something before its first collective.
VARIANTS = {
    "replicate": ("replicate", False, 25),
    "replicate_tiny": ("replicate", False, 1e-6),
    "replicate_normed": ("replicate", True, 25),
    "fully_shard": ("fully_shard", False, 2e-4),
}


class Parting(DTensorContinuousTestBase):
    """The base of tests with one model and several steps."""

    def _start(self, variant, **options):
        style, normed, bucket_mb = VARIANTS[variant]
        torch.manual_seed(self.rank)
        self.model = Branching(normed).to(self.device_type)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.mode = DataParallel(style, bucket_mb=bucket_mb)
        self.step = capture(parallel_mode=self.mode, **options)(step)
        self.calls = 0

    def _batch(self):
        self.calls += 1
        return tuple(part.to(self.device_type) for part in normal_batch(6, 10)(self.rank, self.calls))

    def _sized(self, *sizes):
        return tuple(part[: sizes[self.rank]] for part in self._batch())

    def _weights(self):
        return [whole(value).clone() for value in (*self.model.parameters(), *self.model.buffers())]

    def _refused(self, call, fragment, error=SPMDError):
        before = self._weights()
        with self.assertRaisesRegex(error, fragment) as caught:
            call()
        self.assertEqual(before, self._weights(), rtol=0, atol=0, msg=f"after: {caught.exception}")


class TestProgramsPart(Parting):
    """Two ranks that part, and go on together."""

    world_size = 2

    @pytest.mark.slow
    @parametrize("variant", list(VARIANTS))
    @parametrize("verify", ["first", "off"])
    def test_branches(self, variant, verify):
        self._start(variant, verify=verify)
        for _ in range(3):
            self.step(self.model, self.optimizer, self._batch(), True)
        for branching_rank in (0, 1):
            self._refused(
                lambda rank=branching_rank: self.step(self.model, self.optimizer, self._batch(), self.rank == rank),
                "different programs",
            )
        for branch in (True, False, True, False, False):  # all ranks change together
            self.step(self.model, self.optimizer, self._batch(), branch)

    @parametrize("variant", ["replicate", "fully_shard"])
    def test_recording_fails_on_one_rank(self, variant):
        self._start(variant)
        looking = capture(parallel_mode=self.mode)(looking_step)
        self.step(self.model, self.optimizer, self._batch(), True)
        expected = "cannot be recorded" if self.rank == 1 else "Rank 1 refused the step"
        # In the first call of a step, and in a later one.
        self._refused(lambda: looking(self.model, self.optimizer, self._batch(), self.rank == 1), expected)
        looking(self.model, self.optimizer, self._batch(), False)
        looking(self.model, self.optimizer, self._batch(), False)
        self._refused(lambda: looking(self.model, self.optimizer, self._batch(), self.rank == 1), expected)
        x, y = self._batch()
        batch = x.requires_grad_(self.rank == 1), y
        expected = "requires_grad=True" if self.rank == 1 else "Rank 1 refused the step"
        self._refused(lambda: looking(self.model, self.optimizer, batch, False), expected)
        looking(self.model, self.optimizer, self._batch(), False)

    @pytest.mark.slow
    def test_different_steps(self):
        self._start("replicate")
        looking = capture(parallel_mode=self.mode)(looking_step)
        for _ in range(2):  # in turns, as for a GAN
            self.step(self.model, self.optimizer, self._batch(), False)
            looking(self.model, self.optimizer, self._batch(), False)
        mine = looking if self.rank == 1 else self.step
        self._refused(lambda: mine(self.model, self.optimizer, self._batch(), False), "is in compiled step")
        self.step(self.model, self.optimizer, self._batch(), False)

    def test_a_model_that_only_one_rank_changes(self):
        self._start("replicate")
        for _ in range(2):
            self.step(self.model, self.optimizer, self._batch(), True)
        if self.rank == 1:
            self.model.first.requires_grad_(False)
        self._refused(lambda: self.step(self.model, self.optimizer, self._batch(), True), "different programs")

    @parametrize("variant", ["replicate", "fully_shard"])
    def test_sizes_that_lead_to_other_updates(self, variant):
        self._start(variant)
        each = capture(parallel_mode=self.mode)(updating_step)
        self._refused(lambda: each(self.model, self.optimizer, self._sized(3, 5)), "different programs")
        each(self.model, self.optimizer, self._sized(4, 4))
        self._refused(lambda: each(self.model, self.optimizer, self._sized(3, 5)), "different programs")
        each(self.model, self.optimizer, self._sized(5, 4))

    @parametrize("variant", ["replicate", "fully_shard"])
    def test_updates_without_collectives(self, variant):
        self._start(variant)
        decaying = capture(parallel_mode=self.mode)(decaying_step)
        decaying(self.model, self.optimizer, self._sized(4, 5))
        before = self._weights()
        decaying(self.model, self.optimizer, self._sized(5, 4))
        self.assertEqual([0.5 * weight for weight in before], self._weights())

    @parametrize("variant", ["replicate", "fully_shard"])
    def test_sizes_that_lead_to_the_same_updates(self, variant):
        self._start(variant)
        for size in [(4, 6), (1, 6), (6, 1), (1, 1)]:
            self.step(self.model, self.optimizer, self._sized(*size), True)

    def test_evaluations_may_differ_in_number(self):
        self._start("replicate")
        evaluate = capture(parallel_mode=self.mode)(evaluation)
        for i in range(3):
            self.step(self.model, self.optimizer, self._batch(), True)
            self.model.eval()
            for _ in range(1 + self.rank + i):
                evaluate(self.model, self._batch())
            self.model.train()

    def test_a_verification_that_one_rank_asks_for(self):
        self._start("replicate")
        for _ in range(3):
            self.step(self.model, self.optimizer, self._batch(), True)
        verified = self.step.last.verified
        self.step(self.model, self.optimizer, self._sized(6, 5), True)  # a new program on rank 1 only
        self.assertEqual(self.step.last.verified, 1 if self.rank else verified + 1)


@pytest.mark.slow
class TestPartingOfFour(Parting):
    """One of four ranks parts."""

    world_size = 4

    @parametrize("variant", ["replicate", "fully_shard"])
    def test_branches(self, variant):
        self._start(variant)
        for _ in range(2):
            self.step(self.model, self.optimizer, self._batch(), True)
        self._refused(
            lambda: self.step(self.model, self.optimizer, self._batch(), self.rank != 2), "different programs"
        )
        self.step(self.model, self.optimizer, self._batch(), False)


instantiate_parametrized_tests(TestProgramsPart)
instantiate_parametrized_tests(TestPartingOfFour)

if __name__ == "__main__":
    run_tests()
