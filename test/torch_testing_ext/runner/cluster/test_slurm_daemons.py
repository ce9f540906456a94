"""Runs on a real Slurm with two nodes on this machine, where its daemons are installed."""

import os
import signal
import time
import unittest

from kit.processes import is_alive
from kit.runs import RunsCase
from kit.slurm import HANGS, MEET, SmallSlurm, missing_daemons

from torch_testing_ext.common_utils import run_tests


@unittest.skipIf(missing_daemons(), "slurmctld, slurmd and munged are not installed")
class SlurmDaemonsTest(RunsCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.slurm = SmallSlurm()
        cls.slurm.__enter__()
        cls.addClassCleanup(cls.slurm.__exit__)

    def jobs(self):
        return self.slurm.ask("squeue", "--noheader", "--format=%j %t").splitlines()

    def wait_until(self, happened):
        end = time.monotonic() + 60
        while not happened():
            self.assertLess(time.monotonic(), end, self.jobs())
            time.sleep(0.05)

    def check(self, process):
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped", self.stderr)
        attempts = [test["attempts"][0] for test in self.results()["tests"]]
        self.assertEqual({attempt["node"] for attempt in attempts}, {"node1", "node2"})
        for attempt in attempts:
            self.assertEqual(attempt["output"].split(), [attempt["node"]])

    def test_in_an_allocation(self):
        """One of one CPU a node, with settings that would spoil the stream of a step."""
        self.write("test/distributed/test_x.py", MEET)
        of_user = {"SLURM_LABELIO": "1", "SLURM_STDOUTMODE": "none", "SLURM_NTASKS_PER_NODE": "2"}
        process = self.start(
            "--cluster=slurm", "--results=results.json",
            before=("salloc", "--quiet", "--nodes=2"), environ={**self.slurm.environ, **of_user},
        )  # fmt: skip
        self.check(process)

    def test_in_an_allocation_of_its_own(self):
        self.write("test/distributed/test_x.py", MEET)
        process = self.start(
            "--cluster=slurm", "-j1", "--cluster-nodes=2", "--results=results.json",
            environ=self.slurm.environ,
        )  # fmt: skip
        self.check(process)
        self.assertEqual([job for job in self.jobs() if not job.endswith(" CG")], [])

    def test_cancelled(self):
        """It does not wait for other nodes."""
        self.write("test/distributed/test_x.py", HANGS)
        os.mkfifo(self.root / "began")
        process = self.start("--cluster=slurm", "-j1", environ=self.slurm.environ)
        self.wait_for_writer("began", process)
        (job,) = self.slurm.ask("squeue", "--noheader", "--format=%i").split()
        self.slurm.ask("scancel", job)
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("no node is left: node node1 was lost: its agent", out)

    def test_killed(self):
        """While it runs on one node, and another run waits for two."""
        self.write("test/distributed/test_x.py", HANGS)
        os.mkfifo(self.root / "began")
        process = self.start("--cluster=slurm", "-j1", environ=self.slurm.environ)
        self.wait_for_writer("began", process)
        pids = [int(pid) for pid in (self.root / "pids").read_text().split()]
        waiting = [self.start("--cluster=slurm", "--cluster-nodes=2", environ=self.slurm.environ) for _ in range(2)]
        self.wait_until(lambda: sorted(job.split()[1] for job in self.jobs()) == ["PD", "PD", "R"])
        for one, number in zip([process, *waiting], (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=True):
            one.send_signal(number)
            one.wait()
        self.wait_until(lambda: not any(map(is_alive, pids)))
        self.wait_until(lambda: not self.jobs())
        self.wait_until(lambda: not self.slurm.allocators())


if __name__ == "__main__":
    run_tests()
