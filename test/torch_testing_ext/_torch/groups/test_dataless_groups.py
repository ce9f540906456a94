"""Groups that do not communicate have the rank and size that were asked for, whatever the backend was."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import fake_world

from torch_testing_ext._torch.groups import dataless_groups


@in_own_process
def test_fake_backend():
    for _ in range(2):
        dataless_groups.register_fake_backend()
    assert dist.Backend._plugins["FAKE"].extended_api
    fake_world(8)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "fake")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, dataless_groups.fake_process_group())
    dist.all_reduce(torch.ones(1))
    assert dist.new_group([0, 3]).size() == 2


@pytest.mark.parametrize("asked", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
@in_own_process
def test_groups_that_become_fake(asked):
    made = []
    dataless_groups.register_fake_backend()
    dataless_groups.make_groups_fake(lambda: made.append(dist.is_initialized()))
    dist.init_process_group(asked, store=dist.HashStore(), rank=1, world_size=3)
    # Would wait for the others, or for devices.
    dist.barrier()
    assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
    dist.new_group([0, 1], backend="gloo")
    assert len(made) == 2
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "fake" and not backend.supports_coalescing


def test_options_of_alike_ranks():
    """Only a torch that has them can compute as if all ranks had the same values."""

    class Options:
        simulate_uniform_ranks = False

    for offered, expected in ((Options, True), (object, None), (None, None)):
        group = SimpleNamespace(Options=offered)
        with mock.patch.object(dataless_groups, "fake_process_group", lambda group=group: group):
            assert getattr(dataless_groups.options_of_alike_ranks(), "simulate_uniform_ranks", None) is expected
