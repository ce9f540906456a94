"""MultiProcessTestCase: skips, in each place where one can be."""

import sys
import unittest

from notes import note
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    MultiProcessTestCase,
    nccl_skip_if_lt_x_gpu,
    require_n_gpus_for_nccl_backend,
    requires_gloo,
    requires_nccl,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
    skip_if_odd_worldsize,
    skip_if_small_worldsize,
    skip_if_win32,
)
from torch.testing._internal.common_utils import (
    run_tests,
    skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if,
    skipIfRocm,
)

STRICTER = {
    "InTheBodyTest.test_rank_0_alone": ("one rank skips, the others run", "failed"),
    "InTheBodyTest.test_rank_1_alone": ("one rank skips, the others run", "failed"),
    "InTheBodyTest.test_in_a_subtest": ("a subtest skips in a rank", "passed"),
}
NEWER = {"ByDecoratorTest.test_no_gpu": "2.15"}


class Spawning(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class InTheBodyTest(Spawning):
    def test_skip_test(self):
        self.skipTest("by skipTest")

    def test_raise(self):
        raise unittest.SkipTest("by raise")

    def test_rank_0_alone(self):
        if self.rank == 0:
            self.skipTest("rank 0 alone")

    def test_rank_1_alone(self):
        if self.rank == 1:
            self.skipTest("rank 1 alone")

    def test_after_a_note(self):
        note(self, "before the skip")
        self.skipTest("late")

    def test_one_fails_one_skips(self):
        if self.rank == 0:
            raise ValueError("rank 0")
        self.skipTest("rank 1")

    def test_in_a_subtest(self):
        with self.subTest("inner"):
            raise unittest.SkipTest("in a subtest")


class ByDecoratorTest(Spawning):
    @unittest.skip("by unittest")
    def test_unittest_skip(self):
        note(self, "body")

    @unittest.skipIf(True, "by skipIf")
    def test_unittest_skip_if(self):
        note(self, "body")

    @unittest.skipUnless(True, "unused")
    def test_unittest_skip_unless(self):
        note(self, "body")

    @skip_if_lt_x_gpu(2)
    def test_two_gpus(self):
        note(self, "body")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_two_gpus_or_cpu(self):
        note(self, "body")

    @skip_if_lt_x_gpu(8)
    def test_eight_gpus(self):
        note(self, "body")

    @requires_gloo()
    def test_gloo(self):
        note(self, "body")

    @requires_nccl()
    def test_nccl(self):
        note(self, "body")

    @nccl_skip_if_lt_x_gpu("nccl", 2)
    def test_nccl_with_two(self):
        note(self, "body")

    @nccl_skip_if_lt_x_gpu("gloo", 2)
    def test_gloo_needs_none(self):
        note(self, "body")

    @require_n_gpus_for_nccl_backend(3, "nccl")
    def test_three_for_nccl(self):
        note(self, "body")

    @require_n_gpus_for_nccl_backend(3, "gloo")
    def test_three_for_gloo(self):
        note(self, "body")

    @skip_if_no_gpu
    def test_no_gpu(self):
        note(self, "body")

    @skip_if_win32()
    def test_not_on_windows(self):
        note(self, "body")

    @skipIfRocm
    def test_not_on_rocm(self):
        note(self, "body")

    @skip_but_pass_in_sandcastle("by sandcastle")
    def test_sandcastle(self):
        note(self, "body")

    @skip_but_pass_in_sandcastle_if(False, "unused")
    def test_sandcastle_if_not(self):
        note(self, "body")


class InSetUpTest(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_before":
            self.skipTest("before the ranks")
        self._spawn_processes()
        self.skipTest("after the ranks")

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()

    def test_before(self):
        pass

    def test_after(self):
        pass


class InSetUpClassTest(MultiProcessTestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("in setUpClass")

    def test_one(self):
        note(self, "body")

    def test_two(self):
        note(self, "body")


@unittest.skip("the class")
class SkippedClassTest(Spawning):
    def test_one(self):
        note(self, "body")


@requires_nccl()
class NcclClassTest(Spawning):
    def test_one(self):
        note(self, "body")


@requires_gloo()
class GlooClassTest(Spawning):
    def test_one(self):
        note(self, "body")


class InTearDownTest(Spawning):
    def tearDown(self):
        super().tearDown()
        self.skipTest("in tearDown")

    def test_passes(self):
        note(self, "body")


class EnvironmentTest(MultiProcessTestCase):
    """Decorators that read WORLD_SIZE and BACKEND in the ranks."""

    world_size = 3

    def setUp(self):
        super().setUp()
        import os

        before = {name: os.environ.get(name) for name in ("WORLD_SIZE", "BACKEND")}
        self.addCleanup(self.restore, before)
        os.environ.update(WORLD_SIZE="3", BACKEND="gloo")
        self._spawn_processes()

    def restore(self, before):
        import os

        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @skip_if_small_worldsize
    def test_small(self):
        note(self, "body")

    @skip_if_odd_worldsize
    def test_odd(self):
        note(self, "body")


class HandledTest(Spawning):
    """`_handle_test_skip` gets the text of the skip, and the test goes on as it says."""

    def _handle_test_skip(self, message):
        note(self, "handled", "at least 2" in message)

    @skip_if_lt_x_gpu(2)
    def test_handled(self):
        note(self, "body")


class InTheRankTest(Spawning):
    """An own `_run` that skips by an exit code, as PyTorch's own do."""

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        sys.exit(TEST_SKIPS["no_cuda"].exit_code)

    def test_never_begins(self):
        note(self, "body")


if __name__ == "__main__":
    run_tests()
