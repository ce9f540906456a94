"""Cutting the connections of a rank ends every wait on the network, no matter when they are cut."""

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torch_testing_ext._hypothesis.groups_of_examples import Connections, _has_unread, _open_connections
from torch_testing_ext._process.private_folders import socket_name
from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import TestCase, run_tests


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


class TestCut(TestCase):
    def pair(self):
        pair = tcp_pair()
        for end in pair:
            self.addCleanup(end.close)
        return pair

    def connections(self):
        connections = Connections()
        self.addCleanup(connections.release)
        return connections

    def test_cut_ends_reading_and_not_writing(self):
        connections = self.connections()
        one, other = self.pair()
        connections.cut(include_busy=False)
        self.assertEqual(one.recv(1), b"")
        self.assertEqual(other.send(b"x"), 1)

    def test_peer_of_a_closed_connection_can_write_until_release(self):
        connections = self.connections()
        one, other = self.pair()
        connections.cut(include_busy=False)
        one.close()
        for _ in range(3):
            self.assertEqual(other.send(b"x"), 1)
        connections.release()
        with self.assertRaises(OSError):
            for _ in range(3):
                other.send(b"x")

    def test_busy_connection_is_cut_only_on_request(self):
        connections = self.connections()
        one, other = self.pair()
        other.send(b"x")
        connections.cut(include_busy=False)
        self.assertEqual(one.recv(1), b"x")
        other.send(b"y")
        connections.cut(include_busy=True)
        self.assertEqual(one.recv(1), b"y")  # data that has already arrived can still be read
        self.assertEqual(one.recv(1), b"")

    def test_connections_from_before_are_not_cut(self):
        one, other = self.pair()
        self.connections().cut(include_busy=True)
        other.send(b"x")
        self.assertEqual(one.recv(1), b"x")


@requires_gloo()
class TestCutDuringASend(MultiProcessTestCase):
    """Rank 0 is stopped after rank 1 asks for its message and before gloo reads the request; then it is cut off."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_send_ends(self):
        address = self.file_name + ".meet"
        listener = socket.socket(socket.AF_UNIX)
        self.inherited = {inode for inode, _ in _open_connections()}
        if self.rank == 1:
            with socket_name(address) as name:
                listener.bind(name)
            listener.listen()
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        (self.be_cut_off if self.rank == 0 else self.cut_off)(listener, address)

    def be_cut_off(self, link, address):
        with socket_name(address) as name:
            link.connect(name)
        work = dist.isend(torch.ones(3), 1)
        (gloo_connection,) = (
            connection.dup() for inode, connection in _open_connections() if inode not in self.inherited
        )
        socket.send_fds(link, [b"%d" % os.getpid()], [gloo_connection.fileno()])
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait(timedelta(seconds=30))
        with self.assertRaisesRegex(RuntimeError, "Connection closed"):
            dist.all_reduce(torch.ones(1))

    def cut_off(self, listener, address):
        connections = Connections()
        pid, (fd,), _, _ = socket.recv_fds(listener.accept()[0], 20, 1)
        with socket.socket(fileno=fd) as gloo_connection:
            wait_until_stopped(int(pid))
            dist.irecv(torch.zeros(3), 0)
            while not _has_unread(gloo_connection):
                pass
            connections.cut(include_busy=True)
        os.kill(int(pid), signal.SIGCONT)


def wait_until_stopped(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


if __name__ == "__main__":
    run_tests()
