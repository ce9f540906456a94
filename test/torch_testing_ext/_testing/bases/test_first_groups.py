"""The first group that a rank makes is the first of its process: gloo counts groups in C++, which forks inherit.

`split_group` of a later default group crashes (docs/found/gloo_split_of_a_second_group.py).
"""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from kit.files import subject
from kit.ranks import Ranks

from torch_testing_ext.common_utils import TestCase, run_tests

TIMEOUT = timedelta(seconds=60)


class Groups(Ranks):
    def splits_and_merges(self):
        """Into groups of one: on torch 2.13, ranks that connect in split_group may wait in vain, in any process."""
        self.join_group()
        parts = [dist.group.WORLD.split_group([rank], TIMEOUT) for rank in range(2)]
        self.assertEqual([part is None for part in parts], [self.rank == 1, self.rank == 0])
        merged = parts[self.rank].merge_remote_group(dist.HashStore(), 1, TIMEOUT)
        merged.allreduce([tensor := torch.ones(1)]).wait()
        self.assertEqual((merged.size(), tensor.item()), (1, 1))


# A program of its own: in a process of pytest, other files may have made groups.
PROGRAM = subject(__file__, "slow_first_groups.py")


class TestFirstGroups(TestCase):
    def test_before_and_after_the_main_process_makes_a_group(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_after_a_group.py")
            file.write_text(PROGRAM)
            here = Path(__file__).parent
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
            done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        methods = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("method:")]
        self.assertEqual(methods, ["fork", "fork-fresh", "fork"], done.stdout)


if __name__ == "__main__":
    run_tests()
