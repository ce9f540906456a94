"""How ranks of a launch on several machines find their hub, and that nobody else does."""

import os
import socket
from unittest import mock

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process.channel import Channel
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch.hub import Hub, WrongRound, connect
from torch_testing_ext.launch.launchers import Launched
from torch_testing_ext.launch.rounds import FromHub, RankJoined

RANK_0, RANK_1 = (Launched(rank, 2, is_one_machine=False, local_rank=0, key="key") for rank in range(2))


class SeveralMachinesTest(TestCase):
    def setUp(self):
        port = self.enterContext(leased_port())
        self.enterContext(mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(port)))

    def test_the_hub_hears_only_connections_that_know_its_token(self):
        ours, theirs = socket.socketpair()
        hub = Hub(RANK_0, theirs, is_reported=False)
        hub.start()
        self.addCleanup(self.end, hub, ours)
        abandon = self.enterContext(mock.patch.object(Launched, "abandon"))
        connection, address = connect(RANK_1)
        self.assertEqual(address, hub.address)
        self.assertEqual(len(address.token), 32)
        connection.settimeout(60)
        stranger: Channel[FromHub] = Channel(connection, FromHub)
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

    def end(self, hub, ours):
        """End the thread, which otherwise lives as long as rank 0, and prevents that others of our tests fork."""
        with mock.patch.object(Launched, "abandon"), mock.patch.object(hub, "_proceed", side_effect=SystemExit):
            ours.close()
            hub.join()
        hub.forget()
        del hub._store  # its server is a thread, too

    def test_without_a_place_to_meet(self):
        del os.environ["MASTER_PORT"]
        with self.assertRaisesRegex(WrongRound, "set them to the machine of rank 0 and a port that is free"):
            connect(RANK_1)


if __name__ == "__main__":
    run_tests()
