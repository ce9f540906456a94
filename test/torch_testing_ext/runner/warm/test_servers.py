"""The life of warm servers, as runs see it. The servers of these tests import no torch, so they start fast."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from kit.processes import ROOT
from kit.warm_runs import TIMEOUT, WarmProject, when_ended

from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext.runner.processes import fork_parent_messages
from torch_testing_ext.runner.warm import warm_client
from torch_testing_ext.runner.warm.warm_client import WarmProcess, WarmServer, find_server, stop_servers


class ServersTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.project = WarmProject(Path(folder))
        self.addCleanup(self.project.close)
        environ = mock.patch.dict(os.environ, self.project.environ, clear=True)
        environ.start()
        self.addCleanup(environ.stop)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.project.root)
        timeout = mock.patch.object(warm_client, "_ANSWER_TIMEOUT", TIMEOUT)
        timeout.start()
        self.addCleanup(timeout.stop)
        self.connections: list[WarmServer] = []

    def find(
        self, may_start: bool = True, *modules: str, root: Path | None = None, **environ: str
    ) -> WarmServer | None:
        root = root or self.project.root
        path = [str(root), str(ROOT), *sys.path]
        server = find_server(root, path, {**os.environ, **environ}, modules, may_start)
        if server is not None:
            self.connections.append(server)
            self.addCleanup(server.close)
        return server

    def found(self, may_start: bool = True, *modules: str, **environ: str) -> WarmServer:
        server = self.find(may_start, *modules, **environ)
        assert server is not None
        return server

    def started(self, *modules: str, **environ: str) -> int:
        """Start a server, and leave it. Returns its pid."""
        before = self.project.servers()
        self.found(True, *modules, **environ).close()
        (pid,) = {*self.project.servers()} - {*before}
        return pid

    # -- which server

    def test_one_for_all_runs(self) -> None:
        self.assertIsNone(self.find(may_start=False))
        pid = self.started()
        self.assertIsNotNone(self.find(may_start=False))
        self.assertIsNone(self.find(may_start=False, MY_LIBRARY="1"))
        self.assertIsNone(self.find(may_start=False, root=self.project.root.parent))
        self.assertEqual(self.project.servers(), [pid])

    def test_several_runs_start_one(self) -> None:
        found: list[WarmServer | None] = []
        threads = [threading.Thread(target=lambda: found.append(self.find())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertNotIn(None, found)
        self.assertEqual(len(self.project.servers()), 1)

    def test_in_a_launch(self) -> None:
        """A server with these variables would look like a rank that others wait for."""
        self.assertIsNone(self.find(MASTER_PORT="1", RANK="0"))

    def test_a_fifth_ends_the_oldest(self) -> None:
        pids = [self.started(MY_LIBRARY=str(number)) for number in range(warm_client.MOST_SERVERS)]
        oldest = when_ended(pids[0])
        self.started(MY_LIBRARY="more")
        oldest()
        self.assertEqual(len(self.project.servers()), warm_client.MOST_SERVERS)

    # -- safety

    def test_a_place_that_cannot_be_written(self) -> None:
        with mock.patch.dict(os.environ, XDG_RUNTIME_DIR="/proc"):
            self.assertIsNone(self.find())

    def test_a_folder_that_others_can_enter(self) -> None:
        os.mkdir(warm_client.folder_of_servers().replace("warm", "x"), 0o700)
        os.chmod(warm_client.folder_of_servers(), 0o755)
        self.assertIsNone(self.find())
        with self.assertRaisesRegex(PermissionError, "can be entered by other users"):
            warm_client.folder_of_servers()

    @unittest.skipUnless(os.getuid() == 0, "takes root, to give a folder to another user")
    def test_a_folder_of_another_user(self) -> None:
        os.chown(warm_client.folder_of_servers(), 12345, 12345)
        self.assertIsNone(self.find())

    def test_a_socket_that_is_something_else(self) -> None:
        pid = self.started()
        (place,) = Path(warm_client.folder_of_servers()).glob("*.socket")
        gone = when_ended(pid)
        os.kill(pid, signal.SIGKILL)
        gone()
        place.unlink()
        place.write_text("not a socket")
        self.started()

    # -- its end

    def test_it_is_told_to_stop(self) -> None:
        ended = when_ended(self.started())
        stop_servers(self.project.root.parent)
        self.assertIsNotNone(self.find(may_start=False))
        stop_servers(self.project.root)
        self.assertIsNone(self.find(may_start=False))
        for server in self.connections:
            server.close()
        ended()

    def test_no_run_for_a_while(self) -> None:
        with mock.patch.object(warm_client, "IDLE", 0.5):
            self.found()
            (pid,) = self.project.servers()
            ended = when_ended(pid)
            # A run keeps it.
            time.sleep(1)
            self.assertIsNotNone(self.find(False))
            for server in self.connections:
                server.close()
            ended()

    def test_its_socket_or_its_working_folder_is_removed(self) -> None:
        for removed in (self.project.runtime, self.project.root):
            with self.subTest(removed.name):
                self.project.runtime.mkdir(exist_ok=True)
                ended = when_ended(self.started())
                shutil.rmtree(removed)
                ended()

    def test_what_it_has_read_changes(self) -> None:
        """A server takes its place, also where none was to be started: there was one."""
        first = self.started()
        self.assertIsNotNone(self.find(False))
        self.assertEqual(self.project.servers(), [first])
        ended = when_ended(first)
        Path(self.project.root, "installed-1.0.dist-info").mkdir()
        self.assertIsNotNone(self.find(False))
        for server in self.connections[:-1]:
            server.close()
        ended()
        self.assertEqual(len(self.project.servers()), 1)

    def test_files_that_were_just_saved(self) -> None:
        """They may have changed without a trace since the server has read them: it serves one run."""
        self.project.write("mine.py", "")
        first = self.started("mine")
        self.assertNotEqual(self.started("mine"), first)

    # -- runs

    def start_run(self, server: WarmServer, **environ: str) -> tuple[WarmProcess, Channel, Path]:
        ours, theirs = socket_pair()
        directory = Path(tempfile.mkdtemp(dir=self.project.root))
        log = directory / "log"
        with theirs, log.open("wb") as file:
            fds = (theirs.fileno(), file.fileno())
            process = server.start_run(directory, [], {**os.environ, **environ}, *fds)
        assert process is not None
        return process, Channel(ours, fork_parent_messages.FromPreloadedServer), directory

    def test_runs_beside_each_other(self) -> None:
        runs = []
        for _ in range(2):
            server = self.found()
            runs.append(self.start_run(server))
        for process, channel, directory in runs:
            self.assertEqual(channel.receive(), [fork_parent_messages.PreloadedServerReady(None)])
            self.assertIsNone(process.returncode)
            channel.close()
            self.assertEqual(process.wait(TIMEOUT), 0)
            self.assertFalse(directory.exists())
        self.assertEqual(len(self.project.servers()), 1)

    def test_a_run_is_killed(self) -> None:
        server = self.found()
        process, channel, _ = self.start_run(server)
        channel.receive()
        process.kill()
        self.assertEqual(process.wait(TIMEOUT), -signal.SIGKILL)

    def test_a_client_is_gone(self) -> None:
        """Its preloaded server ends, although another process still has its channel."""
        server = self.found()
        _, channel, directory = self.start_run(server)
        channel.receive()
        server.close()
        with contextlib.suppress(EOFError):
            while channel.receive():
                pass
        while directory.exists():
            select.select([], [], [], 0.01)

    def test_a_server_is_killed(self) -> None:
        server = self.found()
        process, channel, _ = self.start_run(server)
        channel.receive()
        (pid,) = self.project.servers()
        os.kill(pid, signal.SIGKILL)
        with self.assertRaises(EOFError):
            channel.receive()
        self.assertEqual(process.wait(TIMEOUT), -signal.SIGTERM)
        self.assertTrue(server.is_lost)
        self.assertIsNone(server.start_run(self.project.root, [], {}, 0, 0))


if __name__ == "__main__":
    unittest.main()
