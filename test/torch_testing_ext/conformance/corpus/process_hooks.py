"""MultiProcessTestCase: which process calls which hook, and in what order."""

import os

import torch.distributed as dist
from notes import note
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class Noting(MultiProcessTestCase):
    """Notes each hook."""

    @property
    def world_size(self):
        # Of several ranks that fail, PyTorch's base ends all after the first.
        return 1 if self._testMethodName == "test_fails" else 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        note(cls, "setUpClass")

    @classmethod
    def tearDownClass(cls):
        note(cls, "tearDownClass")
        super().tearDownClass()

    def setUp(self):
        note(self, "setUp begins")
        super().setUp()
        self.addCleanup(note, self, "cleanup")
        self._spawn_processes()
        note(self, "setUp ends")

    def tearDown(self):
        note(self, "tearDown begins")
        super().tearDown()
        note(self, "tearDown ends")


class HooksTest(Noting):
    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        note(self, "body")
        raise ValueError("on purpose")

    def test_skips(self):
        note(self, "body")
        self.skipTest("on purpose")

    def test_group(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        note(self, "group of", dist.get_world_size())


class SecondClassTest(Noting):
    def test_class_hooks_again(self):
        note(self, "body")


class RunsInRanksTest(MultiProcessTestCase):
    """`__init__` runs in the parent and in each rank; setUp and tearDown in the parent alone."""

    @property
    def world_size(self):
        return 2

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made_here = os.getpid()

    def setUp(self):
        super().setUp()
        self.from_set_up = True
        self._spawn_processes()

    def test_init_in_the_rank(self):
        note(self, self.made_here == os.getpid())

    def test_nothing_of_set_up(self):
        note(self, hasattr(self, "from_set_up"), hasattr(self, "processes"), hasattr(self, "pid_to_pipe"))

    def test_parent_and_ranks_differ(self):
        note(self, os.getpid() != os.getppid())


class CleanupsTest(MultiProcessTestCase):
    """A cleanup that the parent registers runs there, after tearDown, last first."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self.addCleanup(note, self, "first")
        self.addCleanup(note, self, "second")
        self._spawn_processes()
        self.addCleanup(note, self, "third")

    def tearDown(self):
        super().tearDown()
        note(self, "tearDown")

    def test_order(self):
        pass


class SetUpRaisesTest(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self.addCleanup(note, self, "cleanup")
        if self._testMethodName == "test_after_ranks":
            self._spawn_processes()
        raise KeyError("in setUp")

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()

    def test_before_ranks(self):
        pass

    def test_after_ranks(self):
        pass


class TearDownRaisesTest(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        raise ValueError("in tearDown")

    def test_passes(self):
        pass

    def test_fails(self):
        raise TypeError("in the rank")


class CleanupRaisesTest(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()
        self.addCleanup(self.raises)

    def raises(self):
        raise ValueError("in the parent's cleanup")

    def test_passes(self):
        pass


class SetUpClassRaisesTest(MultiProcessTestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("in setUpClass")

    def test_never_runs(self):
        note(self, "body")


class TearDownClassRaisesTest(MultiProcessTestCase):
    world_size = 1

    @classmethod
    def tearDownClass(cls):
        raise ValueError("in tearDownClass")

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        pass


class ProcessesTest(MultiProcessTestCase):
    """What the parent sees of its ranks."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()
        note(self, len(self.processes), [process.name for process in self.processes])
        note(self, len(self.pid_to_pipe), sorted(self.pid_to_pipe) == sorted(p.pid for p in self.processes))
        note(self, self.rank, self.MAIN_PROCESS_RANK, self.is_master)
        note(self, self.special_return_code_checks, self.skip_return_code_checks)

    def tearDown(self):
        note(self, [process.exitcode for process in self.processes], [p.is_alive() for p in self.processes])
        super().tearDown()
        note(self, self.processes)

    def test_all_end(self):
        note(self, self.is_master)

    def test_with_seventeen(self):
        os._exit(17)


class TwiceTest(MultiProcessTestCase):
    """The same instance can run again."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def run(self, result=None):
        super().run(result)
        return super().run(result)

    def test_twice(self):
        note(self, "body")


if __name__ == "__main__":
    run_tests()
