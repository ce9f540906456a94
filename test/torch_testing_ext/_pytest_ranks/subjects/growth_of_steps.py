"""Steps whose communication grows with the world as they claim, or faster."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_testing_ext.ranks import spawn
from torch_testing_ext.traffic import TrafficError


def each_with_each():
    for _ in range(dist.get_world_size()):
        dist.all_reduce(torch.ones(8))


@pytest.mark.world_size(2)
def test_sound(dist_env, traffic):
    with traffic() as seen:
        dist.all_reduce(torch.ones(8))
    seen.grows("world", "bytes", at_most=0)
    seen.grows(None, "memory", at_most=0)
    # Of this world size alone.
    assert dist_env.world_size == 2


@pytest.mark.world_size(2)
def test_linear(dist_env, traffic):
    with traffic() as seen:
        each_with_each()
    seen.grows("world", "bytes", at_most=1)
    assert seen.calls() == 2


@pytest.mark.world_size(2)
def test_shards(dist_env, traffic):
    model = nn.Linear(64, 64)
    fully_shard(model)
    with traffic(model) as seen:
        model(torch.ones(2, 64)).sum().backward()
    seen.grows("world", "bytes", "all_gather", at_most=-1)


@pytest.mark.world_size(2)
def test_fault_bytes(dist_env, traffic):
    with traffic() as seen:
        each_with_each()
    seen.grows("world", "bytes", "all_reduce", at_most=0)


@pytest.mark.world_size(2)
def test_fault_memory(dist_env, traffic):
    with traffic() as seen:
        parts = [torch.empty(64) for _ in range(dist_env.world_size)]
        dist.all_gather(parts, torch.ones(64))
    seen.grows(None, "memory", at_most=0.5)


@pytest.mark.world_size(2)
def test_fault_of_the_leader(dist_env, traffic):
    with traffic() as seen:
        dist.barrier()
        if dist_env.rank == 0:
            for peer in range(1, dist_env.world_size):
                dist.send(torch.ones(4), peer)
        else:
            dist.recv(torch.ones(4), 0)
    seen.grows("world", "calls", "send", at_most=0)


@pytest.mark.world_size(2)
def test_fault_nothing(dist_env, traffic):
    with traffic() as seen:
        dist.all_reduce(torch.ones(8))
    seen.grows(None, "calls", "barrier", at_most=0)


@pytest.mark.world_size(2)
def test_assertion_before(dist_env, traffic):
    with traffic() as seen:
        each_with_each()
    assert seen.calls() == 2
    seen.grows("world", "bytes", at_most=1)


@pytest.mark.world_size(2)
def test_bad_input(dist_env, traffic):
    with traffic() as seen:
        dist.all_reduce(torch.ones(8))
    with pytest.raises(ValueError, match=r"no growth of 'byte'\. Did you mean: bytes"):
        seen.grows("world", "byte", at_most=0)
    with pytest.raises(ValueError, match="at_most is 'linear'; it must be a number"):
        seen.grows("world", "bytes", at_most="linear")
    with pytest.raises(ValueError, match="memory is that of the whole block"):
        seen.grows("world", "memory", at_most=0)
    with pytest.raises(ValueError, match="no group 'tp'"):
        seen.grows("tp", "bytes", at_most=0)


def claim_in_spawn(rank):
    from torch_testing_ext.traffic import traffic

    with traffic() as seen:
        dist.all_reduce(torch.ones(8))
    seen.grows("world", "bytes", at_most=0)


def test_spawn():
    spawn(claim_in_spawn, 2, backend="gloo")


def test_without_ranks(traffic):
    with traffic() as seen:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(8))
        dist.destroy_process_group()
    with pytest.raises(TrafficError, match="growth is told of tests whose ranks"):
        seen.grows(None, "bytes", at_most=0)


class Fresh(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fault(self):
        dist.init_process_group("gloo", init_method="env://")
        with self.traffic() as seen:
            each_with_each()
        seen.grows("world", "calls", at_most=0)


class Kept(MultiProcContinuousTest):
    world_size = 2

    def test_fault(self):
        with self.traffic() as seen:
            each_with_each()
        seen.grows("world", "calls", at_most=0)

    def test_sound(self):
        with self.traffic() as seen:
            dist.barrier()
        seen.grows("world", "calls", at_most=0)
