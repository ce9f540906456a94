"""The test that launch.py measures: some ranks meet on gloo, sum a tensor, and leave.

One text for everybody. The environment says whose base class runs it (KIT), with how many ranks (RANKS), and how many
copies of it the file has (TESTS). Run as it is, this is a test file like any other; with `serve` it runs one test for
each line it reads, so that candidates can take turns.
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
STAYING = "our MultiProcContinuousTest"
FORK = "fork"

KIT = os.environ["KIT"]
RANKS = int(os.environ.get("RANKS", "4"))
TESTS = int(os.environ.get("TESTS", "1"))
HOLD = Path(os.environ.get("HOLD", "/nonexistent"))  # where ranks that are to be weighed report, and wait


def meet(rank: int, file_name: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(file_name, RANKS), rank=rank, world_size=RANKS)


def work(rank: int) -> None:
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(RANKS))
    if (HOLD / "ready").exists():
        with open(HOLD / "ready", "w") as ready:
            ready.write(f"{os.getpid()}\n")
        with open(HOLD / "go", "rb", buffering=0) as go:
            go.read(1)


def meet_and_work(self) -> None:
    meet(self.rank, self.file_name)
    work(self.rank)


if KIT == FORK:

    def fork_rank(rank: int, file_name: str) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                meet(rank, file_name)
                work(rank)
                dist.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        return pid

    def test(self) -> None:
        """The floor: the loop that anybody would write who forks ranks by hand."""
        with tempfile.TemporaryDirectory() as directory:
            pids = [fork_rank(rank, f"{directory}/store") for rank in range(RANKS)]
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * RANKS

    Subject = type("Subject", (unittest.TestCase,), {})
    run_tests = unittest.main

else:
    home = {CONTINUOUS: TORCH, STAYING: OURS}.get(KIT, KIT)
    common_distributed = importlib.import_module(f"{home}.common_distributed")
    run_tests = importlib.import_module(f"{home}.common_utils").run_tests

    if KIT in (CONTINUOUS, STAYING):  # its ranks make the group once for all tests
        test = lambda self: work(self.rank)  # noqa: E731

        class Subject(common_distributed.MultiProcContinuousTest):
            world_size = RANKS

            @classmethod
            def backend_str(cls) -> str:
                return "gloo"

    else:  # ours and PyTorch's: the same names
        test = meet_and_work

        class Subject(common_distributed.MultiProcessTestCase):
            world_size = RANKS

            def setUp(self) -> None:
                super().setUp()
                self._spawn_processes()


for number in range(TESTS):
    setattr(Subject, f"test_{number:03}", test)


def run_one() -> float:
    """Seconds for one test. Not through a suite, which would end persistent ranks after it."""
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
    """How many processes are started for a test that needs more devices than there are."""

    class Skipped(Subject):
        @common_distributed.skip_if_lt_x_gpu(1000)
        def test_on_devices(self) -> None:
            raise AssertionError("this was to be skipped")

    common_distributed.at_least_x_gpu(1)  # counting devices is done once for all tests
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
