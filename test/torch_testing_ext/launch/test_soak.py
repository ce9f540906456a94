"""Tests that resources do not accumulate: 180 tests of two ranks leave no more behind than sixty."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.ranks import Ranks

from torch_testing_ext.launch import start

pytestmark = pytest.mark.slow

TESTS = 180
# By then the server has warmed up, collapsed its memory into huge pages, and run all of its code.
WARM_UP = 60
# One page of 4 kB lost in each of the 120 following launches would be 0.49 MB. The measured growth is 0: the server
# frees the memory of a launch after it, and reuses it for the next.
MARGIN = 0.39


class Sum(Ranks):
    def sum_up(self) -> None:
        self.join_group()
        tensor = torch.full((1,), float(self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 1.0)


@dataclass(frozen=True)
class Resources:
    """Resources that may accumulate, of this process and of the server that starts its ranks."""

    descriptors: list[str]
    descriptors_of_server: list[str]
    children: list[str]
    children_of_server: list[str]
    threads_of_server: int
    session_entries: list[str]
    temporary_entries: list[str]


def count_resources() -> Resources:
    server = start.launcher().server.pid
    return Resources(
        descriptors=descriptors(os.getpid()),
        descriptors_of_server=descriptors(server),
        children=children(os.getpid()),
        children_of_server=children(server),
        threads_of_server=len(os.listdir(f"/proc/{server}/task")),
        session_entries=os.listdir(start.launcher()._directory),
        temporary_entries=os.listdir(tempfile.gettempdir()),
    )


def descriptors(pid: int) -> list[str]:
    """The target of each descriptor, without the numbers of sockets and pipes."""
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    # The descriptor that was open for the listing is closed by now.
    return sorted(os.readlink(link).partition(":[")[0] for link in links if os.path.lexists(link))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def anonymous_megabytes(pid: int) -> float:
    """Anonymous memory, including pages shared with the process that forked this one."""
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
        """Use a temporary directory of this test alone, for a new session."""
        start.close()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        patch = mock.patch.object(tempfile, "tempdir", directory.name)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(start.close)

    def test_nothing_accumulates(self):
        run_tests(WARM_UP)
        server = start.launcher().server.pid
        before, memory_before = count_resources(), anonymous_megabytes(server)
        run_tests(TESTS - WARM_UP)
        self.assertEqual(start.launcher().server.pid, server, "the server was replaced meanwhile")
        after, memory_after = count_resources(), anonymous_megabytes(server)
        self.assertEqual(before, after)
        self.assertLess(memory_after - memory_before, MARGIN, "MB more in the server")


if __name__ == "__main__":
    unittest.main()
