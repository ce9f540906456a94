"""The test that launch.py measures: ranks create a gloo group, sum a tensor, destroy the group or leave it, and exit.

All candidates run this file. Environment variables select the base class (KIT; with ",destroying", the test destroys
its group), the number of ranks (RANKS), the number of copies of the test (TESTS), and whether ranks only pass (ALONE).
Without arguments it runs like any test file; with `serve` it runs one test for each line it reads, so that candidates
can take turns.
"""

import importlib
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

import torch
import torch.distributed as dist

OURS = "torch_testing_ext"
TORCH = "torch.testing._internal"
CONTINUOUS = "MultiProcContinuousTest"
OUR_CONTINUOUS = "our MultiProcContinuousTest"
FORK = "fork"

KIT, _, DESTROYS = os.environ["KIT"].partition(",")
RANKS = int(os.environ.get("RANKS", "4"))
TESTS = int(os.environ.get("TESTS", "1"))
ALONE = os.environ.get("ALONE") == "1"
# If launch.py has put its pipes into this directory, each rank reports its pid there and waits to be released.
PAUSE_DIRECTORY = Path(os.environ.get("PAUSE_DIRECTORY", "/nonexistent"))


def init_group(rank: int, store) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def check_all_reduce(rank: int) -> None:
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(RANKS))
    if (PAUSE_DIRECTORY / "ready").exists():
        with open(PAUSE_DIRECTORY / "ready", "w") as ready:
            ready.write(f"{os.getpid()}\n")
        with open(PAUSE_DIRECTORY / "go", "rb", buffering=0) as go:
            go.read(1)


def init_and_check(self) -> None:
    if ALONE:
        return
    init_group(self.rank, dist.FileStore(self.file_name, RANKS))
    check_all_reduce(self.rank)
    if DESTROYS:
        dist.destroy_process_group()


if KIT == FORK:

    def fork_rank(rank: int, file: str) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                init_group(rank, dist.FileStore(file, RANKS))
                check_all_reduce(rank)
                if DESTROYS:
                    dist.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        return pid

    def test(self) -> None:
        """The floor: a plain loop that forks ranks by hand, which do the same work."""
        with tempfile.TemporaryDirectory() as directory:
            pids = [fork_rank(rank, f"{directory}/store") for rank in range(RANKS)]
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * RANKS

    Subject = type("Subject", (unittest.TestCase,), {})
    run_tests = unittest.main

else:
    package = {CONTINUOUS: TORCH, OUR_CONTINUOUS: OURS}.get(KIT, KIT)
    common_distributed = importlib.import_module(f"{package}.common_distributed")
    run_tests = importlib.import_module(f"{package}.common_utils").run_tests

    if KIT in (CONTINUOUS, OUR_CONTINUOUS):  # its ranks create the group once for all tests
        test = lambda self: check_all_reduce(self.rank)  # noqa: E731

        class Subject(common_distributed.MultiProcContinuousTest):
            world_size = RANKS

            @classmethod
            def backend_str(cls) -> str:
                return "gloo"

    else:  # our MultiProcessTestCase and PyTorch's have the same names
        test = init_and_check

        class Subject(common_distributed.MultiProcessTestCase):
            world_size = RANKS

            def setUp(self) -> None:
                super().setUp()
                self._spawn_processes()


for number in range(TESTS):
    setattr(Subject, f"test_{number:03}", test)


def run_one() -> float:
    """Seconds for one test, run without a suite, which would end persistent ranks after it."""
    result = unittest.TestResult()
    case = Subject("test_000")
    began = time.perf_counter()
    case.run(result)
    seconds = time.perf_counter() - began
    assert result.wasSuccessful() and not result.skipped, result
    return seconds


def serve() -> None:
    for _ in sys.stdin:
        print(run_one(), flush=True)
    Subject.tearDownClass()


def count_starts_for_a_skip() -> None:
    """Print how many processes start for a test that needs more devices than there are."""

    class Skipped(Subject):
        @common_distributed.skip_if_lt_x_gpu(1000)
        def test_on_devices(self) -> None:
            raise AssertionError("the decorator did not skip this test")

    common_distributed.at_least_x_gpu(1)  # devices are counted once for all tests
    starts: list[str] = []
    events = {"os.fork", "os.posix_spawn", "os.exec", "subprocess.Popen"}
    sys.addaudithook(lambda event, _: starts.append(event) if event in events else None)
    result = unittest.TestResult()
    Skipped("test_on_devices").run(result)
    assert len(result.skipped) == 1, result
    print(len(starts))


if __name__ == "__main__":
    modes = {"serve": serve, "count-starts-for-a-skip": count_starts_for_a_skip}
    modes.get(sys.argv[-1], run_tests)()
