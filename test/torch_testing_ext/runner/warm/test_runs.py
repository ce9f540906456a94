"""`torchtest --warm`: runs with a warm server read test files again, and nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.warm_runs import WarmProject, parent_of, when_ended

pytestmark = pytest.mark.slow

_TEST = """
import torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase


class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), EXPECTED)
"""


_PLAIN = """
import unittest


class PlainTest(unittest.TestCase):
    def test_plain(self):
        pass
"""
# Tells its pid, and passes at SIGUSR1.
_WAITS = """
import os
import signal
import unittest


class WaitsTest(unittest.TestCase):
    def test_waits(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        with open({place!r}, "w") as file:
            file.write(str(os.getpid()))
        signal.sigwait([signal.SIGUSR1])
"""


class WarmRunsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.project = WarmProject(Path(folder.name))
        self.addCleanup(self.project.close)

    def _run(self, expected: int, *options: str) -> tuple[int, bool]:
        """Save the test, and run it. Returns the exit code, and whether the header says that the run was warm."""
        self.project.write("test/test_ranks.py", _TEST.replace("EXPECTED", str(expected)))
        done = self.project.run(*options)
        return done.returncode, "warm" in done.stdout.splitlines()[0]

    def test_edits_and_options(self) -> None:
        self.assertEqual(self._run(2), (0, False))
        self.assertEqual(self.project.servers(), [])
        self.assertEqual(self._run(3, "--warm"), (1, True))
        self.assertEqual(self._run(2, "--warm"), (0, True))
        (server,) = self.project.servers()
        self.assertEqual(self._run(3), (1, True))
        self.assertEqual(self.project.servers(), [server])
        self.project.environ["CI"] = "1"
        self.assertEqual(self._run(2), (0, False))
        ended = when_ended(server)
        self.assertEqual(self._run(2, "--warm=off"), (0, False))
        ended()
        self.assertEqual([path.name for path in self.project.runtime.glob("*/*")], ["lock"])

    def test_a_command_that_imports_nothing_stops_servers(self) -> None:
        """A list of tests whose files have not changed, and a misspelt name."""
        self.project.write("test_one.py", _PLAIN)
        for words in (), ("--warm",):
            self.assertIn("1 passed", self.project.run(*words).stdout)
        (server,) = self.project.servers()
        ended = when_ended(server)
        self.assertIn("1 test", self.project.run("--warm=off", "--list").stdout)
        ended()
        self.assertIn("1 passed", self.project.run("--warm").stdout)
        (server,) = self.project.servers()
        ended = when_ended(server)
        self.assertEqual(self.project.run("--warm=off", "test_two.py").returncode, 4)
        ended()

    def test_affected(self) -> None:
        """The record of a warm run has the names in folders as they are, not as the server has seen them."""
        self.project.write("test_one.py", _PLAIN)
        for words in ("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "one"):
            subprocess.run(["git", *words], cwd=self.project.root, check=True)
        self.assertIn("1 passed", self.project.run("--warm").stdout)
        self.project.write("other.py", "")
        self.assertIn("1 passed", self.project.run("--warm").stdout)
        for option in "--warm", "--warm=off":
            with self.subTest(option):
                self.assertIn("no test is affected", self.project.run(option, "--affected").stdout)
        self.project.write("test_one.py", _PLAIN + "# saved\n")
        self.assertIn("1 passed", self.project.run("--warm", "--affected").stdout)

    def test_a_killed_run_leaves_nothing(self) -> None:
        place = self.project.root / "pid"
        os.mkfifo(place)
        self.project.write("test/test_waits.py", _WAITS.format(place=str(place)))
        run = self.project.start("--warm")
        ended = when_ended(int(place.read_text()))
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
        ended()

    def test_a_killed_preloaded_server(self) -> None:
        """What it leaves running ends, and the run goes on with another one."""
        place = self.project.root / "pid"
        os.mkfifo(place)
        self.project.write("test/test_waits.py", _WAITS.format(place=str(place)))
        run = self.project.start("--warm", "test/test_waits.py")
        waits = int(place.read_text())
        ended = when_ended(waits)
        (server,) = self.project.servers()
        ancestors = [waits]
        while ancestors[-1] != server:
            ancestors.append(parent_of(ancestors[-1]))
        os.kill(ancestors[-2], signal.SIGKILL)
        ended()
        said, _ = run.communicate(timeout=120)
        self.assertIn("0 passed, 1 failed", said)
        self.assertEqual(self.project.servers(), [server])

    def test_a_killed_server(self) -> None:
        """The run goes on with a preloaded server of its own."""
        place = self.project.root / "pid"
        os.mkfifo(place)
        self.project.write("test/test_waits.py", _WAITS.format(place=str(place)))
        self.project.write("test/test_ranks.py", _TEST.replace("EXPECTED", "2"))
        run = self.project.start("--warm", "-j1", "test/test_waits.py", "test/test_ranks.py")
        ended = when_ended(int(place.read_text()))
        (server,) = self.project.servers()
        os.kill(server, signal.SIGKILL)
        ended()
        said, _ = run.communicate(timeout=120)
        self.assertIn("1 passed, 1 failed", said)

    def test_a_stopped_server_ends_after_its_run(self) -> None:
        place = self.project.root / "pid"
        os.mkfifo(place)
        self.project.write("test/test_waits.py", _WAITS.format(place=str(place)))
        self.project.write("test/test_ranks.py", _TEST.replace("EXPECTED", "2"))
        run = self.project.start("--warm", "test/test_waits.py")
        waits = int(place.read_text())
        (server,) = self.project.servers()
        ended = when_ended(server)
        self.assertEqual(self.project.run("--warm=off", "test/test_ranks.py").returncode, 0)
        os.kill(waits, signal.SIGUSR1)
        said, _ = run.communicate(timeout=120)
        self.assertIn("1 passed", said)
        ended()


if __name__ == "__main__":
    unittest.main()
