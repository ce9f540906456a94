import asyncio
import os
import threading
from pathlib import Path

import measured
import pytest
import pytest_asyncio

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.compat.deepspeed import DistributedFixture
from torch_testing_ext.ranks import spawn


def rank():
    return int(os.environ["RANK"])


@pytest.mark.world_size(2)
def test_ranks(dist_env):
    measured.in_rank(dist_env.rank)


def once(name):
    file = Path(__file__).with_name(name)
    is_first = not file.exists()
    file.touch()
    return is_first


@pytest.fixture
def is_first():
    return once("flaky_ran")


@pytest.mark.flaky(reruns=2)
@pytest.mark.world_size(2)
def test_flaky(is_first, dist_env):
    assert not is_first or dist_env.rank == 0


@pytest.mark.world_size(2)
def test_fails(dist_env):
    measured.in_failing_rank()
    with open(Path(__file__).with_name("runs"), "a") as file:
        file.write(f"{dist_env.rank}\n")
    assert dist_env.rank == 0


@pytest.mark.timeout(3)
@pytest.mark.flaky(reruns=0)
@pytest.mark.world_size(2)
def test_hangs():
    if rank():
        threading.Event().wait()


@pytest.mark.timeout(120, method="thread")
@pytest.mark.world_size(2)
def test_timeout_by_a_thread(): ...


@pytest.mark.asyncio
async def test_async():
    await asyncio.sleep(0)
    assert measured.in_async_test() == 5


@pytest_asyncio.fixture
async def async_value():
    await asyncio.sleep(0)
    yield 3


@pytest.mark.world_size(2)
def test_async_fixture(async_value):
    assert async_value == 3 and asyncio.run(asyncio.sleep(0, "slept")) == "slept"


class UnittestTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        self.assertEqual(measured.in_unittest_rank(), 1)


def body(rank):
    assert measured.in_spawned_rank() == 2


def test_spawn():
    spawn(body, 2)


class in_ranks(DistributedFixture):
    def run(self):
        assert measured.in_fixture() == 3


def test_fixture(in_ranks): ...


@pytest.mark.standalone
def test_standalone():
    assert measured.in_standalone_test() == 4
