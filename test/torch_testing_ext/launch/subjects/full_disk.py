import contextlib
import os
import tempfile

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


def fill():
    with open(os.path.join(tempfile.gettempdir(), "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass


def empty():
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(tempfile.gettempdir(), "filler"))


class TestFull(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self.addCleanup(empty)
        if "before" in self._testMethodName:
            fill()
        self._spawn_processes()

    def test_full_before(self):
        pass

    def test_full_meanwhile(self):
        if self.rank == 1:
            fill()
            raise ValueError("filled the disk and could still report it " + "x" * 30000)


if __name__ == "__main__":
    run_tests()
