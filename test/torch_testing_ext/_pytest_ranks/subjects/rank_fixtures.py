import os

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def group(request):
    if request.node.get_closest_marker("world_size") and "without" not in request.node.name:
        assert request.getfixturevalue("dist_env").rank == int(os.environ["RANK"])
    yield


@pytest.fixture(autouse=True)
def number(ranks):
    return None if ranks is None else (ranks.rank, ranks.world_size, ranks.local_rank, ranks.device.type, ranks.devices)


@pytest.fixture
def projects_own(ranks):
    yield ranks


@pytest.mark.world_size(2)
def test_marked(number):
    rank = dist.get_rank()
    assert number == (rank, 2, rank, "cpu", 0)


@pytest.mark.world_size(2)
class TestWithout:
    def test_without_group(self, ranks):
        assert not dist.is_initialized() and ranks.world_size == 2


def test_unmarked(number, projects_own):
    assert number is None and projects_own is None


class TestOwnNames:
    @pytest.fixture
    def dist_env(self):
        return "the project's"

    @pytest.fixture
    def ranks(self):
        return os.getpid()

    @pytest.fixture
    def number(self): ...

    def test_unmarked(self, dist_env):
        assert dist_env == "the project's"

    @pytest.mark.world_size(2)
    def test_marked_without(self, ranks):
        assert ranks == os.getppid() or ranks != os.getpid()


class TestExtended:
    @pytest.fixture
    def dist_env(self, dist_env):
        return dist_env.rank

    @pytest.mark.world_size(2)
    def test_marked_without(self, dist_env):
        assert dist_env == dist.get_rank()


def init():
    dist.init_process_group("gloo")


def init_for(ranks):
    dist.init_process_group("gloo", rank=1 - ranks.rank)


@pytest.mark.world_size(2, init=init)
def test_init(dist_env):
    assert (dist_env.backend, dist_env.group.size(), dist_env.store) == ("gloo", 2, None)


@pytest.mark.world_size(2, init=init_for)
def test_init_with_the_rank(dist_env):
    assert dist.get_rank() == 1 - dist_env.rank


@pytest.mark.world_size(2, init=print)
def test_init_makes_none(dist_env): ...


@pytest.mark.world_size(2, init="gloo")
def test_bad_init(): ...


@pytest.mark.world_size(1025)
def test_too_many(): ...
