"""Tests that fail by rank 1: the line that ends with the name of its test is where."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(3)


def test_raises(dist_env):
    if dist_env.rank == 1:
        raise ValueError("planted")  # test_raises
    dist.all_reduce(torch.ones(1))


def test_is_wrong(dist_env):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 3 + (dist_env.rank == 1)  # test_is_wrong


def test_leaves(dist_env):
    if dist_env.rank == 1:
        return
    dist.all_reduce(torch.ones(1))  # test_leaves


def test_calls_another(dist_env):
    if dist_env.rank == 1:
        dist.broadcast(torch.ones(1), 0)  # test_calls_another
    else:
        dist.all_reduce(torch.ones(1))


def test_sends_another_shape(dist_env):
    dist.all_reduce(torch.ones(2 if dist_env.rank == 1 else 1))  # test_sends_another_shape


def test_is_killed(dist_env):
    if dist_env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # test_is_killed


def test_exits(dist_env):
    if dist_env.rank == 1:
        os._exit(7)
    dist.barrier()  # test_exits
