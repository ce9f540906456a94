import asyncio
import functools
import logging
import os
import signal
import sys
import threading
import unittest
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def rank():
    return int(os.environ["RANK"])


class OwnWarning(UserWarning): ...


def drives(function):
    return functools.wraps(function)(lambda *args, **kwargs: [None for _ in function(*args, **kwargs)] and None)


def returns(function):
    return functools.wraps(function)(lambda *args: function(*args))


class TestPasses:
    pytestmark = pytest.mark.world_size(2)

    def test_group(self, dist_env):
        tensor = torch.ones(2) * (dist_env.rank + 1)
        dist.all_reduce(tensor, group=dist_env.group)
        assert tensor.tolist() == [3.0, 3.0]
        assert (dist_env.world_size, dist_env.local_rank, dist_env.backend) == (2, rank(), "gloo")
        dist_env.store.set(f"rank{rank()}", "here")
        assert dist_env.store.get(f"rank{1 - rank()}") == b"here"

    def test_env_rendezvous(self):
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"]
        dist.init_process_group("gloo")
        dist.barrier()

    def test_raises(self, dist_env):
        with pytest.raises(ZeroDivisionError):
            dist_env.rank / 0

    @pytest.fixture
    def properties(self, request):
        yield
        assert request.node.user_properties == [("key", "value of 0"), ("number", 3), ("path", "/x")]

    def test_tells(self, properties, record_property):
        print("printed", rank())
        print("complained", rank(), file=sys.stderr)
        logging.warning("logged %d", rank())
        warnings.warn("warned")
        warnings.warn(OwnWarning("own"))
        record_property("key", f"value of {rank()}")
        record_property("number", 3)
        record_property("path", Path("/x"))

    @pytest.mark.parametrize("number", [1, 2])
    def test_parametrized(self, number, capsys, caplog, recwarn):
        print(number)
        logging.error("number %d", number)
        warnings.warn("observed")
        assert capsys.readouterr().out == f"{number}\n"
        assert f"number {number}" in caplog.text
        assert "observed" in str(recwarn.pop().message)

    def test_capfd(self, capfd):
        os.write(1, b"raw")
        assert capfd.readouterr().out == "raw"


@pytest.mark.world_size(2)
class TestAsync:
    async def test_coroutine(self, dist_env):
        await asyncio.sleep(0)
        assert dist_env.rank == 0, "in a coroutine"

    @pytest.mark.asyncio
    async def test_coroutine_for_a_plugin(self, dist_env):
        await asyncio.sleep(0)

    @drives
    def test_generator_that_is_driven(self, dist_env):
        yield
        assert dist_env.rank == 0, "in a generator"

    @returns
    def test_generator_that_is_returned(self):
        yield


@pytest.mark.world_size(2)
class CoroutineTest(unittest.IsolatedAsyncioTestCase):
    async def test_coroutine(self):
        self.assertEqual(rank(), 0)


@pytest.mark.world_size([1, 2])
def test_sizes():
    assert int(os.environ["WORLD_SIZE"]) in (1, 2)


@pytest.mark.world_size(2)
class UnittestTest(unittest.TestCase):
    def setUp(self):
        self.rank = rank()

    def test_passes(self):
        self.assertEqual(self.rank, rank())

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_subtest_fails(self):
        with self.subTest(number=1):
            self.assertEqual(self.rank, 0)

    def test_skips(self):
        self.skipTest("unittest's skip")

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_tear_down_fails(self):
        self.addCleanup(self.assertEqual, self.rank, 0)


class TestFails:
    pytestmark = pytest.mark.world_size(2)

    def test_assertion(self):
        print("before the assertion")
        value = rank()
        assert value == 0

    def test_pytest_fail(self):
        if rank() == 1:
            pytest.fail("by pytest.fail")

    def test_sys_exit_with_0(self):
        if rank() == 1:
            sys.exit(0)

    def test_pytest_exit(self):
        if rank() == 1:
            pytest.exit("enough", returncode=0)

    def test_skips_in_one_rank(self):
        if rank() == 1:
            pytest.skip("only here")

    def test_both_hang_after_the_end(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def test_thread_raises_and_exits(self):
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()

    def test_forked_child(self):
        if os.fork() == 0:
            return
        assert os.wait()[1] == 0
        assert rank() == 0

    @pytest.mark.filterwarnings("error")
    def test_warning_is_an_error(self):
        if rank() == 1:
            warnings.warn("made an error")

    @pytest.mark.usefixtures("bad_tear_down")
    def test_tear_down(self):
        pass

    @pytest.mark.usefixtures("bad_set_up")
    def test_set_up(self):
        pass


@pytest.fixture
def bad_tear_down(dist_env):
    yield
    assert dist_env.rank == 0, "torn down"


@pytest.fixture
def bad_set_up(dist_env):
    assert dist_env.rank == 0, "set up"


@pytest.mark.world_size(2)
class TestMarks:
    def test_skips_in_all_ranks(self):
        pytest.skip("in all")

    @pytest.mark.skip(reason="before any rank")
    def test_skip(self): ...

    @pytest.mark.skipif(True, reason="on a condition")
    def test_skipif(self): ...

    @pytest.mark.world_size(2, devices=99)
    def test_needs_devices(self): ...

    @pytest.mark.world_size(99, backend="nccl")
    def test_needs_a_backend(self): ...

    @pytest.mark.xfail(raises=ValueError, strict=True)
    def test_xfail(self):
        raise ValueError("expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_in_one_rank(self):
        if rank() == 1:
            raise ValueError("expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_by_another_error(self):
        raise (TypeError if rank() else ValueError)("not expected")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail_and_a_death(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("expected")

    @pytest.mark.xfail(strict=True)
    def test_xfail_passes(self): ...

    def test_xfail_in_the_body(self):
        pytest.xfail("in the body")

    def test_xfail_added_in_the_body(self, request):
        request.node.add_marker(pytest.mark.xfail(reason="added"))
        raise ValueError

    def test_strict_xfail_added_in_the_body(self, request):
        request.node.add_marker(pytest.mark.xfail(strict=True))

    def test_strict_xfail_added_by_a_fixture(self, adds_xfail): ...


@pytest.fixture
def adds_xfail(request, dist_env):
    request.applymarker(pytest.mark.xfail(strict=True))
