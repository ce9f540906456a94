"""run_test.py with a warm server: its preloaded server is a fork of the server's, and reads test files again."""

from __future__ import annotations

import signal
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.warm_runs import WarmBench

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


_WAITS = """
import os
import time
import unittest


class WaitsTest(unittest.TestCase):
    def test_waits(self):
        with open({place!r}, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
"""


class WarmRunnerTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bench = WarmBench(Path(folder.name))
        self.addCleanup(self.bench.close)
        self.bench.environ.pop("CI", None)
        # A compiled file does not tell sources of one size and second apart, and these runs take less than a second.
        self.bench.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def _run(self, expected: int, *options: str) -> tuple[int, bool]:
        self.bench.write("test/test_ranks.py", _TEST.replace("EXPECTED", str(expected)))
        done = self.bench.run("-m", "torch_testing_ext", *options, warm=False)
        return done.returncode, "warm" in done.stdout.splitlines()[0]

    def test_edits_and_options(self) -> None:
        self.assertEqual(self._run(2, "--warm"), (0, True))
        self.assertEqual(self._run(3), (1, True))
        self.assertEqual(self._run(2), (0, True))
        self.bench.environ["CI"] = "1"
        self.assertEqual(self._run(2), (0, False))

    def test_a_killed_run_leaves_nothing(self) -> None:
        place = self.bench.project / "pid"
        self.bench.write("test/test_waits.py", _WAITS.format(place=str(place)))
        # The next run removes the folder of a run that was killed, and here none follows.
        temporary = self.bench.project / "temporary"
        temporary.mkdir()
        environ = {**self.bench.environ, "TMPDIR": str(temporary)}
        run = self.bench.start("-m", "torch_testing_ext", "--warm", warm=False, env=environ)
        pid = 0
        while not pid:
            if place.exists() and (said := place.read_text()):
                pid = int(said)
        ended = self.bench.when_ended(pid)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
        ended()
