import pytest
import torch
import torch.distributed as dist
from hypothesis import given as given_of_hypothesis, strategies as st

from torch_testing_ext.hypothesis_utils import given, per_rank, settings

few = settings(max_examples=20, database=None, derandomize=True)


@pytest.fixture
def factor(dist_env):
    return 2 * dist_env.world_size


@few
@given(size=st.integers(0, 30), mine=per_rank(st.integers(0, 10)))
@pytest.mark.world_size([2, 3])
def test_sum(dist_env, factor, size, mine):
    assert factor == 2 * dist.get_world_size()
    total = torch.full((size,), float(mine))
    dist.all_reduce(total, group=dist_env.group)
    assert (total >= mine).all()


@pytest.mark.world_size(2)
class TestPlain:
    @pytest.mark.parametrize("factor", [1, 2])
    @few
    @given(n=st.integers(0, 100))
    def test_method(self, dist_env, factor, n):
        tensor = torch.tensor(n * factor)
        dist.broadcast(tensor, 0)
        assert tensor == n * factor


@few
@given(n=st.integers(0, 100))
@pytest.mark.world_size(2)
def test_without_a_group(n):
    tensor = torch.tensor(n)
    dist.broadcast(tensor, 0)
    assert tensor == n


@pytest.mark.world_size(2, scope="module")
@few
@given(n=st.integers(0, 100))
def test_shared(dist_env, n):
    tensor = torch.tensor(n)
    dist.broadcast(tensor, 0)
    assert tensor == n


@pytest.mark.world_size(2, scope="module")
def test_shared_after_it(dist_env):
    dist.barrier()


@pytest.mark.world_size(2)
class TestOwnGiven:
    @pytest.mark.parametrize("factor", [1, 2])
    @few
    @given_of_hypothesis(n=st.integers(0, 100), mine=per_rank(st.integers(0, 10)), data=st.data())
    def test_method(self, dist_env, factor, n, mine, data):
        tensor = torch.tensor([n * factor, data.draw(st.integers(0, 100))])
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert first.equal(tensor)
        dist.all_reduce(tensor)
        assert tensor.equal(2 * first) and mine <= 10


@pytest.mark.world_size(2, scope="module")
@few
@given_of_hypothesis(st.integers(0, 100))
def test_own_given_shared(dist_env, n):
    tensor = torch.tensor(n)
    dist.broadcast(tensor, 0)
    assert tensor == n


@few
@given_of_hypothesis(n=st.integers(0, 100))
@pytest.mark.world_size(2)
def test_own_given_fails(dist_env, n):
    dist.barrier(group=dist_env.group)
    assert n < 17 or dist_env.rank != 1


@few
@given(n=st.integers(0, 100))
@pytest.mark.world_size(2)
def test_fails(dist_env, n):
    dist.barrier(group=dist_env.group)
    assert n < 17 or dist_env.rank != 1


@few
@given(n=st.integers(0, 100))
def in_ranks(rank, n):
    assert n < 50


def test_spawned(spawn):
    spawn(in_ranks, 2)
