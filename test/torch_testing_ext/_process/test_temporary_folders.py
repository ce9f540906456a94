"""Tests folders that do not outlive their process."""

import os
import select
import tempfile
from pathlib import Path

from torch_testing_ext._process.temporary_folders import removed_if_killed
from torch_testing_ext.common_utils import TestCase, run_tests


class RemovedTest(TestCase):
    def test_at_the_end(self) -> None:
        folder = Path(tempfile.mkdtemp())
        with removed_if_killed(folder):
            (folder / "file").touch()
        self.assertFalse(folder.exists())

    def test_a_pipe_of_this_process_ends_meanwhile(self) -> None:
        """The process that would remove the folder does not keep it open."""
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        with removed_if_killed(Path(tempfile.mkdtemp())):
            os.close(writer)
            ready, _, _ = select.select([reader], [], [], 60)
            self.assertEqual(ready, [reader])


if __name__ == "__main__":
    run_tests()
