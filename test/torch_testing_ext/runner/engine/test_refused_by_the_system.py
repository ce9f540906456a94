"""What run_test.py does when the system refuses what a unit or a process needs. Starts no preloaded server."""

import errno
import gc
import os
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

from torch_testing_ext._process.channels import socket_pair
from torch_testing_ext._process.requested_children import RequestedChildren
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.engine.running_unit import RunningUnit, UnitListener
from torch_testing_ext.runner.engine.unit_log import EndCause
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Lease, Test, TestId, Unit
from torch_testing_ext.runner.options import CannotRun, Options
from torch_testing_ext.runner.processes import file_handle, file_processes
from torch_testing_ext.runner.processes.unit_spec import UnitSpec

NO_MORE_FILES = OSError(errno.EMFILE, "Too many open files")


def spec_of(number: int) -> UnitSpec:
    unit, ranks = Path("/unit"), Path("/ranks")
    return UnitSpec(number, "/f.py", LoadAs(), "/", ("T.test_it",), (1.0,), ("command",), ("show",), unit, ranks, {})


class RefusedTest(TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.preloaded_server = file_processes.FileProcesses(self.root)
        self.preloaded_server.directory = self.root
        self.addCleanup(self.preloaded_server.loop.close)
        self.told: list[str] = []

    def step(self) -> None:
        self.preloaded_server.loop.step(time.monotonic())

    def start(self, file: file_handle.FileHandle) -> None:
        ours, theirs = socket_pair()
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)
        self.addCleanup(file.start(spec_of(0), theirs, self.told.append).channel.close)

    def start_unit(self, timeout: float = 1.0) -> RunningUnit:
        test = Test(TestId("test_x.py", "T", "test_it"))
        options = Options(timeout=timeout, slow_after=60.0)
        return RunningUnit(Unit(0, (test,)), Lease(), self.preloaded_server, options, {}, UnitListener(), "command")

    def test_the_first_preloaded_server(self) -> None:
        refuse = BlockingIOError(errno.EAGAIN, "no more processes")
        with (
            mock.patch.object(subprocess, "Popen", side_effect=refuse),
            file_processes.FileProcesses(self.root) as made,
            self.assertRaisesRegex(CannotRun, "cannot be started: .*no more processes"),
        ):
            made.count_devices()

    def test_the_channel_of_a_file(self) -> None:
        """The unit leaves nothing behind, and the next one tries again, instead of waiting for ever."""
        gc.collect()  # it closes files that earlier tests have left open
        open_before = sorted(os.listdir("/proc/self/fd"))
        with mock.patch.object(file_handle, "socket_pair", side_effect=NO_MORE_FILES), self.assertRaises(OSError):
            self.start_unit()
        self.assertEqual(self.preloaded_server.file("test_x.py").state, file_handle.FileState.CLOSED)
        self.assertEqual(sorted(os.listdir("/proc/self/fd")), open_before)
        self.assertEqual(os.listdir(self.root), [])

    def test_a_request_to_the_preloaded_server(self) -> None:
        self.preloaded_server._channel = mock.Mock(**{"send.side_effect": NO_MORE_FILES})
        self.preloaded_server.start_child(lambda number: number, self.told.append)
        self.assertEqual(self.told, [])
        self.step()
        self.assertEqual(self.told, ["could not be started: [Errno 24] Too many open files"])
        self.assertEqual(len(self.preloaded_server.children), 0)

    def test_a_request_to_a_file(self) -> None:
        file = self.preloaded_server.file("test_x.py")
        file.state = file_handle.FileState.READY
        units = RequestedChildren(self.preloaded_server.loop)
        file._process = mock.Mock(units=units, free=[], fresh=set(), **{"channel.send.side_effect": NO_MORE_FILES})
        self.start(file)
        self.assertEqual(self.told, [])
        self.step()
        self.assertEqual(self.told, ["could not be started: [Errno 24] Too many open files"])

    def test_a_unit_waits_until_its_file_is_imported(self) -> None:
        file = self.preloaded_server.file("test_x.py")
        file.state = file_handle.FileState.OPENING
        self.start(file)
        self.step()
        self.assertEqual(self.told, [])
        self.assertEqual([start.args[0].number for start in file._waiting], [0])

    def test_the_start_of_a_unit_is_no_time_of_its_test(self) -> None:
        """The test has not begun while its file is imported, so it has not timed out."""
        self.preloaded_server.file("test_x.py").state = file_handle.FileState.OPENING  # its units wait
        unit = self.start_unit(timeout=0.001)
        self.assertFalse(self.preloaded_server.loop.step(time.monotonic() + 0.05), "a timer was due")
        self.assertEqual((unit.cause, unit._stacks_wanted), (EndCause.ITSELF, []))
        unit._close()


if __name__ == "__main__":
    run_tests()
