"""Five hundred tests of four ranks in one process leave nothing behind that a hundred did not."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.launch import client

TESTS = 500
# By then the server has warmed up, gathered its memory, and met every line that it will ever run.
WARM_UP = 100
# One page of 4 kB lost in each of the 400 launches that follow would be 1.6 MB. Measured growth is 0: what the server
# allocates for a launch it frees after it, and takes the same again for the next.
MARGIN = 0.8


class Sum(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def sum_up(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.full((1,), float(self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 6.0)


@dataclass(frozen=True)
class Belongings:
    """What may pile up: of this process, and of the server that starts its ranks."""

    descriptors: list[str]
    descriptors_of_server: list[str]
    children: list[str]
    children_of_server: list[str]
    threads_of_server: int
    session_entries: list[str]
    temporary_entries: list[str]


def take_stock() -> Belongings:
    server = client.launcher().server.pid
    return Belongings(
        descriptors=descriptors(os.getpid()),
        descriptors_of_server=descriptors(server),
        children=children(os.getpid()),
        children_of_server=children(server),
        threads_of_server=len(os.listdir(f"/proc/{server}/task")),
        session_entries=os.listdir(client.launcher()._directory),
        temporary_entries=os.listdir(tempfile.gettempdir()),
    )


def descriptors(pid: int) -> list[str]:
    """What each one is, without the numbers of sockets and pipes."""
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    # The descriptor that listed the others is closed by now.
    return sorted(os.readlink(link).partition(":[")[0] for link in links if os.path.lexists(link))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def anonymous_megabytes(pid: int) -> float:
    """Memory that is not a file's, also where it is shared with the process it was forked from."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1000


def run_tests(count: int) -> None:
    result = unittest.TestResult()
    for _ in range(count):
        Sum("sum_up").run(result)
    problems = [text for _, text in result.errors + result.failures]
    assert not problems, problems[0]
    assert result.testsRun == count and not result.skipped


@unittest.skipUnless(sys.platform.startswith("linux"), "looks at processes through /proc")
class SoakTest(unittest.TestCase):
    def setUp(self) -> None:
        """A temporary directory for this process alone, and a session that is made in it."""
        client.close()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        patch = mock.patch.object(tempfile, "tempdir", directory.name)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(client.close)

    def test_nothing_piles_up(self):
        run_tests(WARM_UP)
        server = client.launcher().server.pid
        before, memory_before = take_stock(), anonymous_megabytes(server)
        run_tests(TESTS - WARM_UP)
        self.assertEqual(client.launcher().server.pid, server, "the server was replaced meanwhile")
        after, memory_after = take_stock(), anonymous_megabytes(server)
        self.assertEqual(before, after)
        self.assertLess(memory_after - memory_before, MARGIN, "MB more in the server")


if __name__ == "__main__":
    unittest.main()
