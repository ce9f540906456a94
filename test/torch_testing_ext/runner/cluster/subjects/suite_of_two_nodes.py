import os
import pathlib
import time
import unittest

from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_utils import TestCase


class T(TestCase):
    def test_passes(self):
        print(os.environ.get("MINE"), [name for name in os.environ if name.startswith("RAY_")])
        print(pathlib.Path("link").is_symlink(), pathlib.Path("set_up").exists(), pathlib.Path("ignored.txt").exists())
        pathlib.Path("out").write_text("written on a node")
        pathlib.Path("kept").write_text("changed")

    def test_accepts(self):
        self.assertExpectedInline("new", """old""")

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_dies(self):
        os._exit(7)

    def meet_others(self):
        """Wait until three of four have begun, more than one node runs at once; or a while."""
        folder = os.environ.get("MEETING")
        if folder is None:
            time.sleep(0.5)
            return
        pathlib.Path(folder, self.id()).touch()
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)

    def test_of_one_node_0(self):
        self.meet_others()

    def test_of_one_node_1(self):
        self.meet_others()

    def test_of_one_node_2(self):
        self.meet_others()

    def test_of_one_node_3(self):
        self.meet_others()


class Devices(unittest.TestCase):
    def setUp(self):
        print(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"])

    @skip_if_lt_x_gpu(2)
    def test_two(self):
        pass

    @skip_if_lt_x_gpu(3)
    def test_three(self):
        pass
