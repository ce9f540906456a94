"""MultiProcessTestCase: what follows from the ends of ranks: exit codes, signals, sys.exit."""

import os
import signal
import sys

from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

STRICTER = {
    "OneRankTest.test_rank_1_exits_with_3": ("a rank other than 0 crashes or exits with another code", "error"),
    "OneRankTest.test_rank_1_is_killed": ("a rank other than 0 crashes or exits with another code", "error"),
    "OneRankTest.test_rank_1_sys_exit_5": ("a rank other than 0 crashes or exits with another code", "error"),
    "OneRankTest.test_rank_1_aborts": ("a rank other than 0 crashes or exits with another code", "error"),
    "OneRankTest.test_rank_0_leaves_with_0": ("a rank calls `os._exit(0)` half-way", "error"),
    "OneRankTest.test_rank_1_leaves_with_0": ("a rank calls `os._exit(0)` half-way", "error"),
    "OneRankTest.test_rank_1_skips_by_code": ("one rank skips, the others run", "failed"),
    "OneRankTest.test_rank_0_skips_by_code": ("one rank skips, the others run", "failed"),
    "AllRanksTest.test_os_exit_0": ("a rank calls `os._exit(0)` half-way", "error"),
    "AllRanksTest.test_sys_exit_0": ("a rank calls `os._exit(0)` half-way", "error"),
    "AllRanksTest.test_sys_exit_none": ("a rank calls `os._exit(0)` half-way", "error"),
    "AllRanksTest.test_raise_system_exit": ("a rank calls `os._exit(0)` half-way", "error"),
}


class Spawning(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class AllRanksTest(Spawning):
    def test_passes(self):
        pass

    def test_sys_exit_0(self):
        sys.exit(0)

    def test_sys_exit_none(self):
        sys.exit()

    def test_raise_system_exit(self):
        raise SystemExit

    def test_sys_exit_1(self):
        sys.exit(1)

    def test_sys_exit_7(self):
        sys.exit(7)

    def test_sys_exit_text(self):
        sys.exit("a text is exit code 1")

    def test_os_exit_0(self):
        os._exit(0)

    def test_os_exit_4(self):
        os._exit(4)

    def test_sigkill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_sigterm(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def test_sigabrt(self):
        os.abort()

    def test_keyboard_interrupt(self):
        raise KeyboardInterrupt


class OneRankTest(Spawning):
    def test_rank_0_exits_with_3(self):
        if self.rank == 0:
            os._exit(3)

    def test_rank_1_exits_with_3(self):
        if self.rank == 1:
            os._exit(3)

    def test_rank_0_leaves_with_0(self):
        if self.rank == 0:
            os._exit(0)

    def test_rank_1_leaves_with_0(self):
        if self.rank == 1:
            os._exit(0)

    def test_rank_0_is_killed(self):
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_rank_1_is_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_rank_1_aborts(self):
        if self.rank == 1:
            os.abort()

    def test_rank_0_sys_exit_5(self):
        if self.rank == 0:
            sys.exit(5)

    def test_rank_1_sys_exit_5(self):
        if self.rank == 1:
            sys.exit(5)

    def test_rank_0_skips_by_code(self):
        if self.rank == 0:
            sys.exit(TEST_SKIPS["generic"].exit_code)

    def test_rank_1_skips_by_code(self):
        if self.rank == 1:
            sys.exit(TEST_SKIPS["generic"].exit_code)


class SkipCodesTest(Spawning):
    """An exit with the code of a skip is that skip."""

    def test_no_cuda(self):
        sys.exit(TEST_SKIPS["no_cuda"].exit_code)

    def test_nccl(self):
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    def test_small_worldsize(self):
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

    def test_three_gpus(self):
        sys.exit(80)  # its name differs between versions of torch

    def test_importerror(self):
        sys.exit(TEST_SKIPS["importerror"].exit_code)

    def test_os_exit(self):
        os._exit(TEST_SKIPS["no_accelerator"].exit_code)

    def test_generic(self):
        sys.exit(TEST_SKIPS["generic"].exit_code)


class ExpectedCodesTest(MultiProcessTestCase):
    """special_return_code_checks and skip_return_code_checks, by the method as setUp finds it."""

    world_size = 2

    def setUp(self):
        super().setUp()
        test = getattr(self, self._testMethodName).__wrapped__
        if self._testMethodName.startswith("test_any"):
            self.skip_return_code_checks.append(test)
        else:
            self.special_return_code_checks[test] = int(self._testMethodName.rpartition("_")[2])
        if self._testMethodName.startswith("test_signal"):
            self.special_return_code_checks[test] *= -1
        self._spawn_processes()

    def test_code_3(self):
        os._exit(3)

    def test_code_by_sys_exit_3(self):
        sys.exit(3)

    def test_other_code_3(self):
        os._exit(4)

    def test_no_code_3(self):
        pass

    def test_raises_instead_of_3(self):
        raise ValueError("no exit")

    def test_signal_6(self):
        os.abort()

    def test_signal_9(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_signal_not_sent_9(self):
        pass

    def test_any_passes(self):
        pass

    def test_any_exits(self):
        os._exit(self.rank + 3)

    def test_any_is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_any_raises(self):
        raise ValueError("still an error")


if __name__ == "__main__":
    run_tests()
