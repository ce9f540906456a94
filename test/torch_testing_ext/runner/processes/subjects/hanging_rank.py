import time

from torch_testing_ext import common_distributed
from torch_testing_ext.common_utils import timeout


class Process(common_distributed.MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @timeout(0.5)
    def test_process(self):
        time.sleep(600)


class Thread(common_distributed.MultiThreadedTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @timeout(0.5)
    def test_thread(self):
        time.sleep(600)
