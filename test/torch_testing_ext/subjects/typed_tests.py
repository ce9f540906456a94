"""Tests of a project that checks its types strictly."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext.hypothesis_utils import given, per_rank, settings
from torch_testing_ext.ranks import DistEnv, Ranks, RunScript, ScriptRun, Spawn, run_script, spawn


@pytest.fixture
def model(dist_env: DistEnv) -> Iterator[torch.nn.Module]:
    yield torch.nn.Linear(dist_env.world_size, 2).to(dist_env.device)


@pytest.mark.world_size([2, 4])
def test_model(dist_env: DistEnv, model: torch.nn.Module) -> None:
    total = torch.ones(dist_env.rank + dist_env.local_rank)
    dist.all_reduce(total, group=dist_env.group)
    assert dist_env.backend == "gloo" and dist_env.devices == 0
    if dist_env.store is not None:
        dist_env.store.set("key", "value")


@pytest.fixture(autouse=True)
def seed(ranks: Ranks | None) -> None:
    torch.manual_seed(0 if ranks is None else ranks.rank)


def work(rank: int, steps: int) -> None: ...


def test_functions(spawn: Spawn, run_script: RunScript) -> None:
    spawn(work, 2, 10, backend="gloo", timeout=3)
    run: ScriptRun = run_script("train.py", "--steps", 2, world_size=2)
    assert "loss" in run.outputs[0]


def test_same_functions() -> None:
    spawner: Spawn = spawn
    runner: RunScript = run_script
    assert spawner and runner


@settings(max_examples=3)
@given(size=st.integers(0, 30), mine=per_rank(st.integers(0, 10)))
@pytest.mark.world_size(2)
def test_property(dist_env: DistEnv, size: int, mine: int) -> None:
    assert size >= 0 <= mine
