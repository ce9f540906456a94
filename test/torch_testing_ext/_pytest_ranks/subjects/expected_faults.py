"""Tests with faults, by the mark and by the decorator, which pytest runs in ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.faults import (
    call,
    calls,
    fault_point,
    fault_sweep,
    faults,
    incarnation,
    kill,
    mark,
    reached,
    restart,
)


def survive():
    dist.barrier()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))


@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1, at=call(2)), within=20)
def test_mark(dist_env):
    survive()


@pytest.mark.world_size(2)
@faults(kill(1, at=call(2)), within=20)
def test_decorator(dist_env):
    survive()


@pytest.mark.world_size(2)
@faults(kill(1, at=call(5)))
def test_never(dist_env):
    dist.barrier()


@pytest.mark.world_size(2)
@faults(kill(1, at=mark("there")), restart(1), must_reach=["again"])
def test_restart(ranks):
    fault_point("there")
    if incarnation():
        reached("again")


@pytest.mark.world_size(2, scope="module")
class TestShared:
    def test_before(self, dist_env):
        dist.barrier()

    @pytest.mark.faults(kill(1, at=call(2)), within=20)
    def test_dies(self, dist_env):
        survive()

    def test_after(self, dist_env):
        dist.barrier()

    @pytest.mark.faults(kill(1, at=call(2)), restart(1))
    def test_restart(self, dist_env):
        pass


@pytest.mark.world_size(2)
@fault_sweep(kill, at=calls(), within=20)
def test_sweep(dist_env):
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))


@pytest.mark.world_size(2, scope="module")
@fault_sweep(kill, at=calls(), within=20)
def test_sweep_of_shared_ranks(dist_env):
    dist.barrier()


@pytest.mark.world_size(2)
@pytest.mark.faults(kill(2, at=call(1)))
def test_no_such_rank(dist_env):
    pass


@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1))
def test_no_point(dist_env):
    pass


@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1, at=call(1)))
@pytest.mark.faults(kill(1, at=call(2)))
def test_two_marks(dist_env):
    pass


@pytest.mark.world_size(2)
@pytest.mark.faults(kill(1, at=call(1)))
@faults(kill(1, at=call(2)))
def test_mark_and_decorator(dist_env):
    pass


@pytest.mark.faults(kill(1, at=call(1)))
def test_no_ranks():
    pass


@faults(kill(1, at=call(1)))
def test_no_ranks_by_the_decorator():
    pass
