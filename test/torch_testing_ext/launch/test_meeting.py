"""How ranks of a launch on several machines find their coordinator, and that nobody else does."""

import dataclasses
import os
import shutil
import signal
import socket
import threading
import unittest
from unittest import mock

from torch_testing_ext._machine.machine_resources import leased_port
from torch_testing_ext._process import system
from torch_testing_ext._process.messages import Channel
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import environment, peers, start
from torch_testing_ext.launch.coordinator import Coordinator, FromCoordinator, RankJoined, WrongRound, connect
from torch_testing_ext.launch.environment import Launched

# Their agents count restarts apart, so a key says nothing on another machine.
RANK_0, RANK_1 = (Launched(rank, 2, is_one_machine=False, local_rank=0, key=f"key {rank}") for rank in range(2))


def leave_stores():
    """End the connections of this process to the store of the launch."""
    for launched in (RANK_0, RANK_1):
        peers._store_of(launched).end_looking(is_rank=False)
    peers._store_of.cache_clear()


class SeveralMachinesTest(TestCase):
    def setUp(self):
        port = self.enterContext(leased_port())
        self.enterContext(mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(port)))

    def test_the_coordinator_hears_only_connections_that_know_its_token(self):
        ours, theirs = socket.socketpair()
        meeting = Coordinator(RANK_0, theirs, is_reported=False)
        meeting.start()
        self.addCleanup(ours.close)
        # Their threads, and those of the store, would prevent that others of our tests fork.
        self.addCleanup(meeting.close)
        self.addCleanup(leave_stores)
        abandon = self.enterContext(mock.patch.object(Launched, "abandon"))
        connection, address = connect(RANK_1)
        self.assertEqual(address, meeting.address)
        self.assertEqual(len(address.token), 32)
        connection.settimeout(60)
        stranger: Channel[FromCoordinator] = Channel(connection, FromCoordinator)
        stranger.send(RankJoined(1, "another token"))
        with self.assertRaises(EOFError):
            stranger.receive()
        connection.close()
        for line in (b"GET / HTTP/1.1\r\n", b"[]\n", b'{"RankJoined": {"rank": [], "token": ""}}\n'):
            connection, _ = connect(RANK_1)
            connection.settimeout(60)
            connection.sendall(line)
            self.assertEqual(connection.recv(1), b"")
            connection.close()
        abandon.assert_not_called()

    def test_without_a_place_to_meet(self):
        del os.environ["MASTER_PORT"]
        # A process has one connection for each launch.
        of_another_launch = dataclasses.replace(RANK_1, key="another key")
        with self.assertRaisesRegex(WrongRound, "set them to the machine of rank 0 and a port that is free"):
            connect(of_another_launch)


class LeaveTest(unittest.TestCase):
    def folder_of_rank(self, end):
        """The folder of a rank of a launcher, when that and all its processes have ended."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with mock.patch.object(environment, "this_launch", lambda: RANK_1):
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

        own = start.launcher().session_directory()
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
