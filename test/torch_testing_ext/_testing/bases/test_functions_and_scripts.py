"""`spawn` and `run_script`: functions and scripts in ranks, from any test."""

import contextlib
import functools
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.files import subject, write
from kit.processes import output_of_python

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_locks import LEASE_FOLDER, LEASED
from torch_testing_ext._process import system
from torch_testing_ext._process.devices_setting import DEVICES_OF_RUN
from torch_testing_ext._testing.bases import spawned_functions
from torch_testing_ext.common_distributed import collectives_may_differ
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import device_leases
from torch_testing_ext.ranks import run_script, spawn

TIMEOUT = 60


def join_group():
    dist.init_process_group("gloo")


def add_up(rank, numbers):
    join_group()
    tensor = torch.tensor(numbers) * (rank + 1)
    dist.all_reduce(tensor)
    print("sum", tensor.tolist())
    assert tensor.tolist() == [3 * number for number in numbers]
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)


def end_in(rank, way):
    if rank == 1:
        way()


def fail():
    raise AssertionError("as asked")


def printed(function, *args, **options):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        result = function(*args, **options)
    return result, stream.getvalue()


class SpawnTest(TestCase):
    def test_passes(self):
        _, text = printed(spawn, add_up, 2, [1, 2])
        self.assertEqual(sorted(text.splitlines()), ["[rank0] sum [3, 6]", "[rank1] sum [3, 6]"])

    def test_inherits_closures_and_what_cannot_be_pickled(self):
        lock, number = threading.Lock(), 5
        spawn(lambda rank, given: self.assertEqual((number, given.locked()), (5, False)), 2, lock)
        spawn(functools.partial(add_up, numbers=[1]), 2)

    def test_what_it_puts_into_a_queue_arrives(self):
        results = multiprocessing.get_context("fork").Queue()
        spawn(lambda rank: [results.put(rank) for _ in range(1000)], 2)
        self.assertEqual(sum(results.get(timeout=10) for _ in range(2000)), 1000)

    @pytest.mark.slow
    def test_failures(self):
        ways = {
            "rank 1 of 2 failed": fail,
            "rank 1 of 2 was killed by SIGKILL": functools.partial(os.kill, 0, signal.SIGKILL),
            "exited with code 0": functools.partial(os._exit, 0),
            "exited with code 3": functools.partial(sys.exit, 3),
            "skipped": functools.partial(unittest.TestCase().skipTest, "alone"),
        }
        for text, way in ways.items():
            with self.subTest(text=text), self.assertRaisesRegex(RuntimeError, text):
                spawn(end_in, 2, way)
        with self.assertRaisesRegex(RuntimeError, r"timed out after .*rank 1 of 2 still running"):
            spawn(end_in, 2, threading.Event().wait, timeout=5)

    def test_ranks_disagree_in_a_collective(self):
        def disagree(rank):
            join_group()
            dist.all_reduce(torch.ones(1, dtype=[torch.float32, torch.int32][rank]))

        def wait_for_each_other(rank):
            join_group()
            groups = [dist.new_group() for _ in range(2)]
            dist.all_reduce(torch.ones(1), group=groups[rank])

        with self.assertRaisesRegex(AssertionError, "rank 0 calls .*float32, rank 1 calls .*int32 in call #1"):
            spawn(disagree, 2)
        with self.assertRaisesRegex(AssertionError, "^rank 0 waits in group"):
            spawn(wait_for_each_other, 2, timeout=TIMEOUT)  # although rank 0 serves a TCPStore
        spawn(collectives_may_differ("to test the mark")(disagree), 2)

    def test_all_ranks_skip(self):
        with self.assertRaisesRegex(unittest.SkipTest, "all of them"):
            spawn(lambda rank: self.skipTest("all of them"), 2)

    def test_bad_world_sizes(self):
        for size in (0, -1, 1.5, None):
            with self.subTest(size=size), self.assertRaisesRegex(ValueError, "world_size is"):
                spawn(add_up, size)

    def test_leaves_nothing_behind(self):
        before = set(system.children(os.getpid()))
        with contextlib.suppress(RuntimeError):
            spawn(end_in, 2, fail)
        self.assertEqual(set(system.children(os.getpid())), before)

    def test_in_new_interpreters(self):
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_START="fork-fresh"):
            printed(spawn, add_up, 2, [1])
            with self.assertRaisesRegex(RuntimeError, "as asked"):
                spawn(end_in, 2, fail)
            with self.assertRaisesRegex(RuntimeError, "cannot be sent the arguments"):
                spawn(end_in, 2, threading.Lock())
            with self.assertRaisesRegex(RuntimeError, "cannot be sent the arguments"):
                spawn(end_in, 2, mock.Mock())

    @pytest.mark.slow
    def test_new_interpreters_get_objects_of_the_main_module(self):
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), "sized.py", SIZED)
            output_of_python(Path(directory, "sized.py"), TORCH_TESTING_EXT_START="fork-fresh")


SIZED = """
from torch_testing_ext.ranks import spawn

class Size:
    value = 3

def check(rank, size):
    assert size.value == 3

if __name__ == "__main__":
    spawn(check, 1, Size())
"""

# A module keeps the pool, whose threads wait for more to do when the script is over.
THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import beside, torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
beside.pool = ThreadPoolExecutor(1)
beside.pool.submit(dist.all_reduce, torch.ones(4)).result()
if "alone" in sys.argv and dist.get_rank() == 0:
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
    thread.start()
    thread.join()
print("over")
"""

SCRIPT = subject(__file__, "script_of_ranks.py")


class RunScriptTest(TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        folder = temporary.name
        self.script = Path(folder, "train.py")
        self.script.write_text(SCRIPT)
        Path(folder, "beside.py").write_text("number = 10\n")

    def test_passes(self):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            run, text = printed(run_script, self.script, ["--steps"], 3, world_size=2, env={"ADDED": "yes"})
        finally:
            torch.set_default_dtype(default)
        self.assertEqual(run.outputs, ("sum 21 --steps 3 yes\nat exit\n",) * 2)
        self.assertIn("[rank1] sum 21 --steps 3 yes\n", text)

    def test_failures(self):
        with self.assertRaisesRegex(RuntimeError, r"(?s)rank 1 of 2 raised .*ValueError: as asked"):
            run_script(self.script, "fail", world_size=2)
        with self.assertRaisesRegex(RuntimeError, "^train.py exited with code 3 in rank 1 of 2"):
            run_script(self.script, "exit", world_size=2)
        with self.assertRaisesRegex(RuntimeError, "rank 1"):
            run_script(self.script, "sleep", world_size=2, timeout=2)

    def test_threads(self):
        self.script.write_text(THREADS)
        self.assertEqual(run_script(self.script, world_size=2).outputs, ("over\n", "over\n"))
        with self.assertRaisesRegex(RuntimeError, "^rank 1 left before all_reduce #3; rank 0 is waiting in it"):
            run_script(self.script, "alone", world_size=2)

    @pytest.mark.slow
    def test_under_torchrun(self):
        run, _ = printed(run_script, self.script, world_size=2, env={"ADDED": "yes"}, launcher="torchrun")
        self.assertEqual(run.outputs[0].count("sum 21 yes\n"), 2)
        with self.assertRaisesRegex(RuntimeError, r"(?s)torchrun exited with code 1: train.py in 2 ranks.*as asked"):
            run_script(self.script, "fail", world_size=2, launcher="torchrun")

    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, "there is no script"):
            run_script(self.script.with_name("other.py"))
        with self.assertRaisesRegex(ValueError, "world_size is 0"):
            run_script(self.script, world_size=0)
        with self.assertRaisesRegex(ValueError, "launcher is 'mpirun'"):
            run_script(self.script, launcher="mpirun")
        with self.assertRaisesRegex(ValueError, "devices is 'cuda'; it must be 'auto', or a number of accelerators"):
            run_script(self.script, devices="cuda")
        with self.assertRaisesRegex(unittest.SkipTest, "devices"):
            run_script(self.script, devices=1000)


class DevicesTest(TestCase):
    """The accelerators that ranks see who have no `dist_env`."""

    def masks(self, count, *arguments, setting="auto"):
        of_machine = {"device_count": lambda: count, "most_ranks": lambda: count, "runtime": lambda: "cuda"}
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.multiple(accelerators, device_uuids=tuple, **of_machine),
            mock.patch.dict(os.environ, {DEVICES_OF_RUN: setting, LEASE_FOLDER: folder}),
            device_leases.variables_of(spawned_functions.need_of_devices(*arguments)) as environ,
        ):
            leased = environ.pop(LEASED, "")
            return len(leased.split(",")) if leased else environ

    def test_leased_or_hidden(self):
        """A number: so many are leased, and nothing is masked."""
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
        for count, arguments, setting, expected in (
            (0, (None, 2), "auto", {}),
            (2, (None, 2), "auto", 2),
            (2, ("auto", 2), "cpu", 2),
            (2, (None, 2), "cpu", hidden),
            (2, (0, 2), "auto", hidden),
            (1, (None, 2), "auto", hidden),
            (1, (1, 2), "auto", 1),
            (1, (None, 2, "gloo"), "auto", {}),
            (2, (None, 2, "nccl"), "cpu", 2),
        ):
            with self.subTest(count=count, arguments=arguments, setting=setting):
                self.assertEqual(self.masks(count, *arguments, setting=setting), expected)

    def test_too_few(self):
        for arguments in ((2, 2), (None, 2, "nccl")):
            with self.assertRaises(unittest.SkipTest):
                self.masks(1, *arguments)

    def test_ranks_have_the_masks(self):
        masks = contextlib.nullcontext({"CUDA_VISIBLE_DEVICES": "none"})
        with mock.patch.object(device_leases, "variables_of", lambda *_: masks):
            spawn(see_devices, 1)


def see_devices(rank):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "none"


if __name__ == "__main__":
    run_tests()
