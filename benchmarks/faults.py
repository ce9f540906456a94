"""Sweeps of planned faults: 3 ranks, each of the 8 faults at each of 20 calls, one run each.

python benchmarks/faults.py [--calls N] [--kinds kill "stop(0.1)" ...]
"""

import argparse
import json
import os
import resource
import time
import unittest
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._process import messages
from torch_testing_ext._tests import notes
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.faults import Points, Sweep, Wrong, faults_of_text

RANKS = 3
KINDS = ("kill", "segv", "abort", "exits(3)", "raises(OSError)", "stop(0.01)", "slow(0.01)", "hold_gil(0.01)")
# For all of it, on two quiet cores.
TARGET = 60.0


class Program(MultiProcessTestCase):
    world_size = RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def runs(self):
        """The survivors stop at the first error."""
        store = dist.FileStore(self.file_name, RANKS)
        limit = timedelta(seconds=10)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=RANKS, timeout=limit)
        total = torch.ones(1)
        try:
            for _ in range(int(os.environ["CALLS"])):
                dist.all_reduce(total)
        except RuntimeError:
            pass


def cpu_seconds():
    """Of this process and of those that have ended: the fork server, and the ranks, for which that has waited."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    options = parser.parse_args()
    sweep = Sweep(faults_of_text(", ".join(options.kinds)), Points("call"), within=20.0, wrong=Wrong.NOTHING)
    os.environ |= {"CALLS": str(options.calls), "_TORCH_TESTING_EXT_SWEEP": json.dumps(messages.encode(sweep))}
    began, result = time.monotonic(), unittest.TestResult()
    Program("runs").run(result)
    seconds = time.monotonic() - began
    (report,) = notes.take_notes().sweeps
    # When the fork server has ended, its ranks count.
    launch.close()
    cpu = cpu_seconds()
    ends = Counter((cell.word, cell.end.value) for cell in report.cells)
    for (word, end), number in ends.items():
        print(f"{word:>16}  {end:<14}  {number}")
    wanted = RANKS * len(options.kinds) * options.calls
    print(f"{len(report.cells)} of {wanted} runs: {seconds:.1f} s, {cpu:.1f} CPU seconds (target: {TARGET:g} s)")
    hung = sum(number for (_, end), number in ends.items() if end in ("hung", "did not happen"))
    return int(not result.wasSuccessful() or len(report.cells) < wanted or hung > 0 or seconds > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
