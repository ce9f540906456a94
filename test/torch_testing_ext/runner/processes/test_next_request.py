"""A supervisor that is free waits for all of its next request."""

import os
import socket
import tempfile
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.processes.fork_parent_messages import Nothing, StartUnit
from torch_testing_ext.runner.processes.supervisor import Supervisor
from torch_testing_ext.runner.processes.supervisor_messages import (
    FromSupervisor,
    SupervisorWatches,
    ToSupervisor,
    WorkerEnded,
)
from torch_testing_ext.runner.processes.unit_spec import UnitSpec

TESTS = tuple(f"T.test_{number:0100}" for number in range(2_000))


def start(unit: UnitSpec, channel: Channel[Nothing], log: int) -> NoReturn:
    os._exit(0 if unit.tests == TESTS else 1)


class RequestInPiecesTest(TestCase):
    def fork_supervisor(self) -> tuple[socket.socket, int]:
        ours, theirs = socket_pair()
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                ours.close()
                Supervisor(Channel(theirs, ToSupervisor), start).serve()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return ours, pid

    def test_a_supervisor_waits_for_all_of_it(self) -> None:
        """The request of a class with many tests is longer than what one read returns."""
        ours, pid = self.fork_supervisor()
        folder = self.make_folder()
        seconds = (1.0,) * len(TESTS)
        spec = UnitSpec(0, "/f.py", LoadAs(), "/", TESTS, seconds, TESTS, TESTS, folder, folder / "ranks", {})
        channel: Channel[FromSupervisor] = Channel(ours, FromSupervisor)
        for _ in range(2):  # one unit after the other
            worker, theirs = socket_pair()
            channel.send(StartUnit(0, spec), theirs.fileno())
            theirs.close()
            said: list[FromSupervisor] = []
            while len(said) < 2:
                said += channel.receive()
            worker.close()
            watches, ended = said
            assert isinstance(watches, SupervisorWatches) and isinstance(ended, WorkerEnded)
            self.assertEqual((watches.pid, ended.status, ended.leftovers), (pid, 0, ()))
        channel.close()
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)

    def make_folder(self) -> Path:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return Path(folder.name)

    def test_a_supervisor_ends_with_its_client(self) -> None:
        ours, pid = self.fork_supervisor()
        ours.sendall(b'{"StartUnit": ')  # and no more
        ours.close()
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)


if __name__ == "__main__":
    run_tests()
