"""Tests that keep budgets in files: named for odd parameters, shared by tests, of ranks that do not come so far."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["plain", 'it\'s "quoted"', "[brackets]", "ünïcode 組", "a b"])
def test_odd(dist_env, traffic, request, name):
    with traffic() as seen:
        dist.all_reduce(torch.ones(len(name)))
    seen.within(f"budgets/{request.node.name}.toml")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(4))
def test_shared(dist_env, traffic, number):
    with traffic() as seen:
        dist.all_reduce(torch.ones(4))
    seen.within("budgets/shared.toml")


@pytest.mark.world_size(2)
def test_grows(dist_env, traffic):
    with traffic() as seen:
        dist.all_reduce(torch.ones(4))
    seen.within("budgets/grows.toml")
    seen.grows("world", "bytes", at_most=0)


@pytest.mark.world_size(2)
def test_leaves(dist_env, traffic):
    with traffic() as seen:
        dist.all_reduce(torch.ones(4))
    if dist_env.rank == 1:
        match os.environ.get("LEAVES"):
            case "skips":
                pytest.skip("rank 1 cannot")
            case "dies":
                os._exit(3)
    seen.within("budgets/leaves.toml")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("calls", [1, 2])
def test_differing(dist_env, traffic, calls):
    with traffic() as seen:
        for _ in range(calls):
            dist.all_reduce(torch.ones(4))
    seen.within("budgets/differing.toml")


@pytest.mark.world_size(2)
def test_varying(dist_env, traffic):
    count = Path(f"count_of_{dist_env.rank}")
    count.write_text(f"{count.read_text() if count.exists() else ''}1")
    with traffic() as seen:
        dist.all_reduce(torch.ones(count.stat().st_size))
    seen.within("budgets/varying.toml")
