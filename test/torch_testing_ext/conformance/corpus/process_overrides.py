"""MultiProcessTestCase: what a class may override, and that its override wins."""

import os
import sys
import time
import unittest

import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests, set_rng_seed


class Spawning(MultiProcessTestCase):
    @property
    def world_size(self):
        # Of several ranks that fail, PyTorch's base ends all after the first.
        return 1 if self._testMethodName == "test_fails" else 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class OwnRunTest(Spawning):
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.before = "set by _run"
        note(self, "kwargs", sorted(kwargs))
        self.run_test(test_name, parent_pipe)
        note(self, "after run_test")

    def test_passes(self):
        note(self, self.before)

    def test_fails(self):
        raise ValueError("after _run")

    def test_skips(self):
        self.skipTest("after _run")


class RunWithGroupTest(Spawning):
    """As other projects do it: the group is made and destroyed by `_run`."""

    destroy_pg_upon_exit = False

    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        dist.init_process_group("gloo", init_method=f"file://{file_name}", rank=rank, world_size=int(self.world_size))
        dist.barrier()
        self.run_test(test_name, parent_pipe)
        dist.barrier()
        dist.destroy_process_group()

    def test_sum(self):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        note(self, tensor.tolist())

    def test_both_skip(self):
        self.skipTest("both")


class RunWithoutTest(Spawning):
    """A `_run` that never calls the test."""

    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        note(self, "no test")

    def test_not_called(self):
        raise ValueError("not called")


class RunExitsTest(Spawning):
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)
        os._exit(0)

    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        raise ValueError("before the exit")


class RunRaisesTest(Spawning):
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        raise ValueError("in _run")

    def test_never_begins(self):
        note(self, "body")


class RunTestTest(Spawning):
    def run_test(self, test_name, parent_pipe):
        note(self, "before", test_name)
        super().run_test(test_name, parent_pipe)
        note(self, "after")

    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        raise ValueError("in the body")


class OwnRunTestTest(Spawning):
    """A `run_test` that does all by itself."""

    def run_test(self, test_name, parent_pipe):
        set_rng_seed()
        try:
            getattr(self, test_name)()
        except unittest.SkipTest:
            sys.exit(common_distributed.TEST_SKIPS["generic"].exit_code)
        except Exception as error:
            parent_pipe.send(f"own text: {error}")
            sys.exit(self.TEST_ERROR_EXIT_CODE)
        finally:
            parent_pipe.close()

    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        raise ValueError("told through the pipe")

    def test_skips(self):
        self.skipTest("by own run_test")


class WorldSizeTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 3 if self._testMethodName == "test_three" else 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_one(self):
        note(self, self.world_size)

    def test_three(self):
        note(self, self.world_size)


class WorldSizeTextTest(Spawning):
    world_size = "2"

    def test_two(self):
        note(self, self.world_size)


class DefaultWorldSizeTest(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_four(self):
        note(self, self.world_size == common_distributed.DEFAULT_WORLD_SIZE)


class WorldSizeOnTheInstanceTest(MultiProcessTestCase):
    """Set by __init__, which the ranks run too."""

    world_size = 1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_two(self):
        note(self, self.world_size)


class CurrentTestNameTest(Spawning):
    """The ranks run the test that this names."""

    def _current_test_name(self):
        return "test_another"

    def test_asked_for(self):
        note(self, "asked for")

    def test_another(self):
        note(self, "another")


class JoinOrRunTest(Spawning):
    def join_or_run(self, fn):
        replaced = super().join_or_run(fn)
        self.replaced = fn.__name__
        return replaced

    def test_replaced(self):
        note(self, self.replaced)


class JoinProcessesTest(Spawning):
    def _join_processes(self, fn):
        note(self, "join", fn.__name__)
        super()._join_processes(fn)
        note(self, "joined", [process.exitcode for process in self.processes])

    def test_passes(self):
        pass

    def test_fails(self):
        raise ValueError("seen by the join")


class OwnJoinTest(Spawning):
    """Waits by itself, with the interface of multiprocessing.Process."""

    def _join_processes(self, fn):
        for process in self.processes:
            process.join()
        note(self, [process.exitcode for process in self.processes])

    def test_passes(self):
        pass

    def test_exit_3(self):
        os._exit(3)

    def test_error_code(self):
        raise ValueError("exits with 10")

    def test_skip_code(self):
        self.skipTest("exits with 86")


class CheckReturnCodesTest(Spawning):
    def _check_return_codes(self, fn, elapsed_time):
        codes = [process.exitcode for process in self.processes]
        note(self, "check", fn.__name__, elapsed_time >= 0, codes)
        if self._testMethodName == "test_accepted":
            return
        super()._check_return_codes(fn, elapsed_time)

    def test_passes(self):
        pass

    def test_accepted(self):
        os._exit(9)

    def test_not_accepted(self):
        os._exit(9)


class StartProcessesTest(Spawning):
    def _start_processes(self, proc):
        note(self, "start", callable(proc))
        super()._start_processes(proc)
        note(self, "started", len(self.processes))

    def test_passes(self):
        note(self, "body")


def independent(number):
    time.sleep(0)
    os._exit(number)


class OwnStartTest(Spawning):
    """Starts processes of its own."""

    def _start_processes(self, proc):
        self.processes = []
        for _ in range(1):
            process = proc(target=independent, args=(0 if self._testMethodName == "test_zero" else 4,))
            process.start()
            self.processes.append(process)

    def test_zero(self):
        note(self, "not called")

    def test_four(self):
        note(self, "not called")


class TimeoutTest(Spawning):
    """The hook for tests that time out, and the timeout of one test."""

    def setUp(self):
        common_distributed.TIMEOUT_OVERRIDE["test_hangs"] = 1
        super().setUp()

    def tearDown(self):
        super().tearDown()
        del common_distributed.TIMEOUT_OVERRIDE["test_hangs"]

    def _get_timedout_process_traceback(self):
        note(self, "timed out")

    def test_hangs(self):
        time.sleep(120)

    def test_in_time(self):
        pass


class TimeoutRaisesTest(Spawning):
    def setUp(self):
        common_distributed.TIMEOUT_OVERRIDE["test_one_rank_hangs"] = 1
        super().setUp()

    def tearDown(self):
        super().tearDown()
        del common_distributed.TIMEOUT_OVERRIDE["test_one_rank_hangs"]

    def test_one_rank_hangs(self):
        if self.rank == 1:
            time.sleep(120)


class GroupAtTheEndTest(Spawning):
    """Who destroys the group: the base, unless the class says otherwise."""

    def run_test(self, test_name, parent_pipe):
        super().run_test(test_name, parent_pipe)
        note(self, "initialized afterwards:", dist.is_initialized())

    def test_destroyed(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)

    def test_destroyed_by_the_test(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        dist.barrier()
        dist.destroy_process_group()


class KeepsGroupTest(GroupAtTheEndTest):
    destroy_pg_upon_exit = False


class ShouldStopTest(Spawning):
    def test_suite_goes_on(self):
        note(self, self._should_stop_test_suite())


class FakePgTest(Spawning):
    """The attribute `fake_pg` arrives at `_run`."""

    fake_pg = True

    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        note(self, kwargs)
        self.run_test(test_name, parent_pipe)

    def test_passed_on(self):
        pass


class RunMixin:
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        note(self, "from the mixin")
        self.run_test(test_name, parent_pipe)


class FromMixinTest(RunMixin, Spawning):
    def test_mixin_wins(self):
        note(self, "body")


if __name__ == "__main__":
    run_tests()
