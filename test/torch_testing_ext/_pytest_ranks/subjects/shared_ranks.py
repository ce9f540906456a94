import logging
import os
import unittest

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2, scope="module")
SEEN = []


@pytest.fixture(scope="module")
def model(dist_env):
    SEEN.append("model")
    yield torch.ones(1) * dist_env.rank
    print("model down")
    raise ValueError("at the end")


@pytest.fixture(scope="class")
def of_class(model):
    SEEN.append("class")
    yield
    SEEN.append("class down")


@pytest.fixture(autouse=True)
def each(ranks):
    yield
    SEEN.append("each down")


@pytest.mark.parametrize("n", [1, 2])
def test_a(model, n):
    SEEN.append(os.getpid())
    print("printed by a", n)
    logging.getLogger().warning("logged by a %d", n)
    dist.all_reduce(model)
    assert SEEN.count("model") == 1 and SEEN.count("each down") == n - 1


class TestC:
    def test_c(self, of_class, tmp_path):
        assert SEEN.count("class") == 1 and tmp_path.exists()

    def test_d(self, of_class):
        assert SEEN.count("class") == 1


def test_one_process(model):
    pids = {each for each in SEEN if isinstance(each, int)}
    assert pids == {os.getpid()} and SEEN.count("class down") == SEEN.count("model") == 1


def test_fails(model):
    assert dist.get_rank() == 0


def test_renewed(model):
    dist.all_reduce(model)
    assert SEEN == ["model"]


def test_dies():
    if os.environ["RANK"] == "1":
        os._exit(3)


@pytest.mark.parametrize("text", ["one", "zwölf"])
def test_of_each_its_own(text, caplog):
    print(text)
    logging.warning(text)
    assert caplog.messages == [text] and "test_of_each_its_own" in os.environ["PYTEST_CURRENT_TEST"]


@pytest.mark.skip(reason="not now")
def test_skipped(): ...


@pytest.mark.xfail(reason="known")
def test_expected():
    assert False


@pytest.mark.xfail(strict=True)
def test_strict(): ...


def test_skips_itself():
    pytest.skip("inside")


@pytest.mark.world_size(1)
def test_fresh():
    assert SEEN == []


class TestOfUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.number = 1

    def setUp(self):
        self.other = 2

    def test_u(self):
        assert self.number + self.other == 3 and os.environ["WORLD_SIZE"] == "2"

    def test_v(self):
        assert self.number + self.other == 3


def test_last(model): ...
