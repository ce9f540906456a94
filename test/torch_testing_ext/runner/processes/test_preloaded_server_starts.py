"""A preloaded server that does not get ready ends the run in time, and says what it printed."""

import os
import tempfile
from pathlib import Path
from unittest import mock

from torch_testing_ext._process import system
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.options import CannotRun
from torch_testing_ext.runner.processes import file_processes, preloaded_client
from torch_testing_ext.runner.processes.preloaded_client import WarmUp


class PreloadedServerStartTest(TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def count_devices(self, source: str) -> None:
        """Ask a preloaded server for something, which first imports a module with this source."""
        (self.root / "imported_first.py").write_text(source)
        with file_processes.FileProcesses(self.root, WarmUp(("imported_first",))) as made:
            made.count_devices()

    def test_an_import_that_never_ends(self) -> None:
        children = system.children(os.getpid())
        source = "import threading\nprint('before the wait', flush=True)\nthreading.Event().wait()\n"
        message = ""
        for seconds in (1, 4, 16, 64):  # on a busy machine, the process does not get as far as that in one
            with (
                mock.patch.object(preloaded_client, "PRELOADED_START_TIMEOUT", seconds),
                mock.patch.object(preloaded_client, "PRELOADED_QUIT_TIMEOUT", 0.1),
                self.assertRaises(CannotRun) as raised,
            ):
                self.count_devices(source)
            message = str(raised.exception)
            self.assertIn(f"was not ready after {seconds} s\n\nIts output:", message)
            if "before the wait" in message:
                break
        self.assertIn("Its output:\nbefore the wait", message)
        self.assertEqual(system.children(os.getpid()), children)

    def test_an_import_that_ends_the_process(self) -> None:
        with self.assertRaisesRegex(CannotRun, "imports torch for all tests exited with code 7"):
            self.count_devices("import os\nos._exit(7)\n")


if __name__ == "__main__":
    run_tests()
