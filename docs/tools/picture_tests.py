"""The tests that are seen in the pictures of the documentation: pictures.py runs them as `test_training.py`."""

import time

import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(4)
def test_gradients_agree(dist_env):
    work(0.6)
    gradient = torch.ones(3, device=dist_env.device)
    dist.broadcast(gradient, src=0)
    work(0.3)
    dist.all_reduce(gradient)


@pytest.mark.world_size(4)
def test_early_stop(dist_env):
    loss = torch.full((3,), float(dist_env.rank), device=dist_env.device)
    dist.all_reduce(loss)
    work(0.1 * dist_env.rank)
    dist.all_reduce(loss)
    if has_converged(dist_env.rank):
        return
    dist.all_reduce(loss)


@pytest.mark.world_size(2, timeout=20)
def test_two_meshes(dist_env):
    data = dist.new_group([0, 1], group_desc="dp")
    tensor = dist.new_group([0, 1], group_desc="tp")
    groups = (data, tensor) if dist_env.rank == 0 else (tensor, data)
    for group in groups:
        dist.all_reduce(torch.ones(3, device=dist_env.device), group=group)


@pytest.mark.world_size(2)
def test_mixed_precision(dist_env):
    dtype = torch.bfloat16 if dist_env.rank == 1 else torch.float16
    dist.all_reduce(torch.ones(4, dtype=dtype, device=dist_env.device))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_pipeline(dist_env, schedule):
    work(0.5)
    dist.barrier()


@pytest.mark.world_size(1)
@pytest.mark.parametrize("bits", [8, 16])
def test_quantised(dist_env, bits):
    work(0.8)


def work(seconds):
    time.sleep(seconds)


def has_converged(rank):
    return rank == 2
