import os

import pytest

with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\n")

IN_PARENT = os.environ["PIDS"] and len(open(os.environ["PIDS"]).read().split()) == 1

import torch.distributed as dist

state = []


def test_changes_the_process():
    state.append(1)


@pytest.mark.world_size(2, isolated=True)
def test_isolated(dist_env):
    dist.barrier()
    assert not state
    assert dist_env.rank == 0


@pytest.mark.world_size(2, isolated=False)
def test_forked(dist_env):
    dist.barrier()
    assert not state
