"""How ranks of a launch on several machines find their coordinator, and that nobody else does."""

import dataclasses
import os
import shutil
import signal
import socket
import threading
import unittest
from unittest import mock

from torch_testing_ext import launch
from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process import system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._torch.groups import process_groups
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import launched_by, start
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.launched import meeting, member
from torch_testing_ext.launch.launched.coordinator import Coordinator
from torch_testing_ext.launch.launched.meeting import WrongRound, connect
from torch_testing_ext.launch.launched.member import Member
from torch_testing_ext.launch.launched.round_messages import FromCoordinator, RankBegins, RankJoined, RoundRefused
from torch_testing_ext.launch.launched_by import Launched

# Their agents count restarts apart, so a key says nothing on another machine.
RANK_0, RANK_1 = (Launched(rank, 2, is_one_machine=False, local_rank=0, key=f"key {rank}") for rank in range(2))
HOW_TO_UNSET = "run: env -u RANK -u WORLD_SIZE "


class SeveralMachinesTest(TestCase):
    def setUp(self):
        self.port = self.enterContext(leased_port())
        self.rank_0, self.rank_1 = (
            dataclasses.replace(launched, store_host="localhost", store_port=str(self.port))
            for launched in (RANK_0, RANK_1)
        )

    def start_coordinator(self):
        """Start the coordinator. Returns the connection of rank 0, whose process this is."""
        ours, theirs = socket.socketpair()
        coordinator = Coordinator(self.rank_0, theirs, is_reported=False)
        coordinator.start()
        self.addCleanup(ours.close)
        # Its threads, and those of the store, would prevent that others of our tests fork.
        self.addCleanup(coordinator.close)
        return coordinator, ours

    def test_the_coordinator_hears_only_connections_that_know_its_token(self):
        coordinator, _ = self.start_coordinator()
        abandon = self.enterContext(mock.patch.object(Launched, "abandon"))
        connection, address = connect(self.rank_1)
        self.assertEqual(address, coordinator.address)
        self.assertEqual(len(address.token), 32)
        connection.settimeout(60)
        stranger: Channel[FromCoordinator] = Channel(connection, FromCoordinator)
        stranger.send(RankJoined(1, "another token"))
        with self.assertRaises(EOFError):
            stranger.receive()
        connection.close()
        for line in (b"GET / HTTP/1.1\r\n", b"[]\n", b'{"RankJoined": {"rank": [], "token": ""}}\n'):
            connection, _ = connect(self.rank_1)
            connection.settimeout(60)
            connection.sendall(line)
            self.assertEqual(connection.recv(1), b"")
            connection.close()
        abandon.assert_not_called()

    def test_without_a_place_to_meet(self):
        with self.assertRaisesRegex(WrongRound, "set them to the machine of rank 0 and a port that is free"):
            connect(dataclasses.replace(self.rank_1, store_port=""))

    def test_a_rank_that_does_not_come(self):
        """The first test waits for it, and later ones do not; each names the variables."""
        coordinator, ours = self.start_coordinator()
        rank_0: Channel[FromCoordinator] = Channel(ours, FromCoordinator)
        ours.settimeout(60)
        rank_0.send(RankJoined(0, coordinator.address.token))
        for timeout, why in ((0.0, "did not start test_x in time"), (None, "an earlier test has waited for it")):
            rank_0.send(RankBegins(launch.Case("test_x"), "/tmp/x", timeout, False, Sanitize()))
            (refused,) = rank_0.receive()
            self.assertIsInstance(refused, RoundRefused)
            self.assertIn(f"rank 1 of 2 {'' if timeout is not None else 'has not come, and '}{why}", refused.message)
            self.assertIn(HOW_TO_UNSET, refused.message)

    def test_nobody_listens(self):
        """The variables are left from a launch that has ended: the rank says so once the others could have come."""
        with (
            mock.patch.object(meeting, "CONNECT_TIMEOUT", 0.1),
            self.assertRaisesRegex(WrongRound, f"rank 0 .* not found .*localhost:{self.port}.*refused.*{HOW_TO_UNSET}"),
        ):
            connect(self.rank_1)

    def test_somebody_else_listens(self):
        """A server that says nothing: torch's store waits for its answer without a limit."""
        has_answered = threading.Event()
        asked = threading.Event()

        def launcher_store(*_):
            asked.set()
            has_answered.wait()
            raise RuntimeError("Ping failed\nframe #0")

        self.addCleanup(has_answered.set)
        with (
            mock.patch.object(process_groups, "launcher_store", launcher_store),
            socket.create_server(("localhost", self.port)),
        ):
            with (
                mock.patch.object(meeting, "CONNECT_TIMEOUT", 1.0),
                self.assertRaisesRegex(WrongRound, f"at localhost:{self.port} is no store of torch.*{HOW_TO_UNSET}"),
            ):
                connect(self.rank_1)
            self.assertTrue(asked.is_set())
            has_answered.set()
            with self.assertRaisesRegex(WrongRound, rf"localhost:{self.port}: Ping failed\).*{HOW_TO_UNSET}"):
                connect(self.rank_1)

    def test_a_rank_alone_tries_once(self):
        """Later tests of a process that has not found rank 0 do not wait again, and its session reports itself."""
        self.enterContext(mock.patch.object(Member, "_why_not_met", ""))
        self.enterContext(mock.patch.object(member, "this_launch", return_value=self.rank_1))
        with mock.patch.object(member, "connect", side_effect=WrongRound("not found")) as connecting:
            for _ in range(2):
                with self.assertRaisesRegex(WrongRound, "not found"):
                    Member.of_this_process()
        self.assertEqual(connecting.call_count, 1)
        self.assertTrue(Member.lacks_rank_0())


class LeaveTest(unittest.TestCase):
    def folder_of_rank(self, end):
        """The folder of a rank of a launcher, when that and all its processes have ended."""
        reader, writer = os.pipe()
        # So that the process which removes the folder keeps it open, too, as it does with the standard streams.
        os.set_inheritable(writer, True)
        child = os.fork()
        if child == 0:
            with mock.patch.object(launched_by, "this_launch", lambda: RANK_1):
                os.write(writer, os.fsencode(start.launcher().session_directory()))
            end()
            os._exit(2)
        os.close(writer)
        with open(reader, "rb") as file:
            folder = os.fsdecode(file.read())
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        return folder, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def test_a_rank_that_is_killed_leaves_no_folder(self):
        """Also one that another thread ends, which has a launcher of its own."""

        def end_by_thread():
            ending = threading.Thread(target=RANK_1.abandon, args=("",))
            ending.start()
            ending.join()

        own = start.new_directory("of this process")
        self.addCleanup(start.discard, own)
        for end, expected in ((end_by_thread, 1), (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL)):
            folder, code = self.folder_of_rank(end)
            self.assertEqual(code, expected)
            self.assertNotEqual(folder, "")
            self.assertFalse(os.path.exists(folder), folder)
        self.assertTrue(own.exists())

    def test_a_rank_that_exits_waits_for_no_process(self):
        def end():
            start.launcher().close()
            os._exit(len(system.descendants(os.getpid())))

        folder, code = self.folder_of_rank(end)
        self.assertEqual(code, 0)
        self.assertFalse(os.path.exists(folder), folder)


if __name__ == "__main__":
    run_tests()
