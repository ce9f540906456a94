"""Scripts that torchrun starts: their collectives are compared at the end, and they run as under Python alone."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.processes import wait_until_gone

from torch_testing_ext._testing.bases import rank_verdicts, torchrun_scripts
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import user_warnings
from torch_testing_ext.ranks import run_script

HEAD = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
"""
DTYPE = (
    HEAD
    + """
dist.barrier()
dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))
dist.destroy_process_group()
"""
)
OPERATION = (
    HEAD
    + """
dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
dist.destroy_process_group()
"""
)
# A pool that ends with the program, and a thread that dies of its peer's end.
THREADS = (
    HEAD
    + """
import threading
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
pool.submit(dist.all_reduce, torch.ones(4)).result()
if "alone" in sys.argv and rank == 0:
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
    thread.start()
    thread.join()
"""
)
# What a wrapper could get wrong; rank 1 leaves nothing.
PLAIN = subject(__file__, "plain_script.py")

# Ends when it is asked to, as torchrun does; its worker stays, and starts another process only then.
LEAVES_ITS_WORKER = subject(__file__, "leaves_its_worker.py")
WORKER = subject(__file__, "worker_that_is_left.py")


class EndTest(unittest.TestCase):
    def test_what_a_worker_starts_while_torchrun_ends(self):
        command = [sys.executable, "-c", LEAVES_ITS_WORKER, WORKER]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            self.assertEqual(process.stdout.readline(), b"ready\n")
            process.stdout.readline()
            torchrun_scripts._end_torchrun(process)
            left = [int(pid) for pid in process.stdout.read().split()]
        self.assertEqual(len(left), 2)
        self.assertEqual(wait_until_gone(left, 10), [])


@pytest.mark.slow
class UnderTorchrunTest(unittest.TestCase):
    def run_script(self, source, *args, sanitize=""):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(os.path.realpath(folder), "train.py")
            script.write_text(source)
            script.with_name("beside.py").touch()
            user_warnings.say_once.cache_clear()
            said = io.StringIO()
            with (
                mock.patch.dict(os.environ, TORCH_TESTING_EXT_SANITIZE=sanitize),
                contextlib.redirect_stderr(said),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                try:
                    run_script(script, *args, world_size=2, launcher="torchrun")
                except RuntimeError as error:
                    return error, said.getvalue()
                except AssertionError as failure:
                    return failure, said.getvalue()
        return None, said.getvalue()

    def test_a_mismatch(self):
        error, said = self.run_script(DTYPE)
        self.assertIsInstance(error, rank_verdicts.RankFailure)
        place = "in call #2 of the default group (ranks 0, 1)"
        calls = "rank 0 calls all_reduce [4] float32, rank 1 calls all_reduce [4] int32"
        self.assertTrue(str(error).startswith(f"{calls} in call #2 of the default group\n"), str(error))
        self.assertIn("\n(train.py, ", error.account)
        self.assertIn(f"ranks disagree {place}: {calls}", error.account)
        self.assertRegex(error.account, r"rank 1: all_reduce \[4\] int32   train.py:9 in <module>")
        self.assertEqual(said, "")

    def test_the_sanitizer(self):
        error, said = self.run_script(OPERATION, sanitize="waits,hash")
        self.assertIsInstance(error, rank_verdicts.RankFailure)
        self.assertIn("rank 0 calls all_reduce [4] float32 sum, rank 1 calls all_reduce [4] float32 max", str(error))
        self.assertEqual(said, "torch_testing_ext: ranks that torchrun starts are not checked for: hash\n")

    def test_threads(self):
        self.assertIsNone(self.run_script(THREADS)[0])
        error, _ = self.run_script(THREADS, "alone")
        self.assertIsInstance(error, rank_verdicts.RankError)
        self.assertRegex(
            str(error), r"(?s)torchrun exited with code 1: train.py in 2 ranks.*in end_threads.*all_reduce"
        )

    def test_a_script_runs_as_ever(self):
        error, said = self.run_script(PLAIN, "a", "--b")
        self.assertIsNone(error)
        self.assertIn("train.py: the collectives of rank 1 were not compared", said)


if __name__ == "__main__":
    run_tests()
