"""pytest with the plugin of the wheel: property tests, scripts, xdist, coverage, fake accelerators and whole worlds."""

from __future__ import annotations

import pytest
from stranger import ROOT, Stranger

PROPERTY = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext.hypothesis_utils import given, per_rank, settings


@settings(max_examples=20, database=None)
@given(size=st.integers(0, 30), mine=per_rank(st.integers(0, 10)))
@pytest.mark.world_size(2)
def test_sum(dist_env, size, mine):
    total = torch.full((size,), float(mine))
    dist.all_reduce(total)
    assert (total >= mine).all()
"""
SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total), *sys.argv[1:])
dist.destroy_process_group()
"""
TEST_SCRIPT = """
def test_script(run_script):
    run = run_script("train.py", "--epochs", "1", world_size=2)
    assert "total 2 --epochs 1" in run.outputs[0]
"""
TEST_SUM = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_sum(dist_env):
    dist.all_reduce(torch.ones(2))
"""
BRANCHES = """
def branch(rank):
    if rank == 1:
        value = "one"
    else:
        value = "another"
    return value
"""
TEST_BRANCHES = """
import pytest
from branches import branch

@pytest.mark.world_size([2, 3])
def test_branches(dist_env):
    assert branch(dist_env.rank) == ("one" if dist_env.rank == 1 else "another")
"""


@pytest.mark.parametrize("runner", ["pytest", "torchtest"])
def test_property(stranger: Stranger, runner: str) -> None:
    """In the form of the other tests: a function with the mark."""
    stranger.write({"test_sum.py": PROPERTY})
    assert "1 passed" in stranger.types(f"{runner} test_sum.py")


def test_types(stranger: Stranger) -> None:
    """The wheel says that it has types, and a strict project finds those of fixtures."""
    source = ROOT / "test" / "torch_testing_ext" / "subjects" / "typed_tests.py"
    stranger.write({"test_typed.py": source.read_text(encoding="utf-8")})
    assert "Success" in stranger.types("mypy --strict test_typed.py")


def test_script(stranger: Stranger) -> None:
    stranger.write({"train.py": SCRIPT, "test_script.py": TEST_SCRIPT})
    assert "1 passed" in stranger.types("pytest test_script.py")


@pytest.mark.parametrize("workers", ["", "-n 2"])
def test_coverage(stranger: Stranger, workers: str) -> None:
    """Of the lines of each rank."""
    stranger.write({"branches.py": BRANCHES, "test_branches.py": TEST_BRANCHES})
    printed = stranger.types(f"pytest {workers} --cov=branches --cov-report=term-missing")
    assert "2 passed" in printed
    assert "branches.py       5      0   100%" in printed


def test_fake_accelerators(stranger: Stranger) -> None:
    stranger.write({"test_branches.py": TEST_BRANCHES, "branches.py": BRANCHES})
    printed = stranger.types("pytest -v --fake-accelerators 2 'test_branches.py::test_branches[world_size=2]'")
    assert "PASSED (2 fake" in printed


def test_whole_world(stranger: Stranger) -> None:
    stranger.write({"test_sum.py": TEST_SUM})
    assert "1 passed" in stranger.types("pytest --simulate 8")


@pytest.mark.parametrize("command", ["pytest -o dist_world_size=3", "torchtest --world-size 3"])
def test_world_size(stranger: Stranger, command: str) -> None:
    """Another number of ranks for one run."""
    source = TEST_SUM.replace("torch.ones(2))", "torch.ones(2))\n    assert dist.get_world_size() == 3")
    stranger.write({"test_sum.py": source})
    assert "1 passed" in stranger.types(command)
