"""Rank 1 of 2 fails an assertion; the story ends when unittest has the failure."""

import os

from kit import story

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class Story(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        os.mkfifo("started")
        os.mkfifo("begun")
        self._spawn_processes()

    def _callTestMethod(self, method):
        try:
            super()._callTestMethod(method)
        finally:
            story.end()

    def test_sum(self):
        # A rank that is still starting is another story; one that passes ends in this one.
        self.meet_at("started")
        if self.rank == 1:
            story.begin()
        self.meet_at("begun")
        if self.rank == 1:
            assert 1 + 1 == 3

    def meet_at(self, fifo):
        with open(fifo, "w" if self.rank == 0 else "r", encoding="utf-8"):
            pass


if __name__ == "__main__":
    run_tests()
