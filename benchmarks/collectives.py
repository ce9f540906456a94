"""Measure what it costs to compare the collectives of all ranks: the same tests with and without, and with the
default kinds of `--sanitize`, in turns.

    python benchmarks/collectives.py [--rounds N] [--files FILE ...] [--quick]
    python benchmarks/collectives.py --one-test [--rounds N]
    python benchmarks/collectives.py --sanitizer
    python benchmarks/collectives.py --traffic

--one-test leaves out the suites. --sanitizer measures instead what a collective costs its rank with each kind of checks
of `--sanitize`: alone in a loop, with and without `async_op`, and among three ranks, where it waits for others and
finds the caches cold. --traffic does so for blocks of `traffic`.
Without means that ranks leave nothing of their collectives and the parent never looks at them. The exit code is 1 if a
target is missed. Both candidates run under a sitecustomize module, which every new interpreter imports first.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import Target

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUITES = "test/distributed"
QUICK = "test/distributed/tensor/parallel/test_ddp_2d_parallel.py"
MOST_PERCENT, MOST_MS = 2.0, 1.0
MOST_PERCENT_SANITIZED = 10.0
MOST_US = 25.0
MOST_US_OF_TRAFFIC = 45.0

WITHOUT = """
from torch_testing_ext.launch import probes
from torch_testing_ext.launch import in_rank
in_rank.collectives_of_test = lambda more_follow=False: b""
probes.FIRST_PROBE = 1e9
"""
WITH = "from torch_testing_ext.launch import probes\nfrom torch_testing_ext.launch import in_rank\n"  # the same imports

# Runs one test of 4 ranks for each line that it reads.
SUBJECT = """
import sys, unittest
import torch, torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase
class T(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test(self):
        store = dist.FileStore(self.file_name, 4)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=4)
        for _ in range(10):
            dist.all_reduce(torch.ones(4))
for line in sys.stdin:
    result = unittest.TestResult()
    T("test").run(result)
    assert result.wasSuccessful(), result.failures + result.errors
    print("done", flush=True)
"""


# Prints the CPU time of an all_reduce, in microseconds, for each word of its arguments: "off", or kinds of checks; with
# "async " before each, that of one with its wait.
HOT = """
import contextlib, sys, tempfile, time
from pathlib import Path
import torch, torch.distributed as dist
from torch_testing_ext._torch.groups import watched_groups
from torch_testing_ext._collectives.sanitizer import rank_sanitizer
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import read_kinds
from torch_testing_ext.launch.causes import is_of_lost_peer
watched_groups.watch_process_groups(lambda name: contextlib.nullcontext(), is_of_lost_peer)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mine = torch.ones(4)
is_async = sys.argv[1] == "async"
best = dict.fromkeys(sys.argv[1 + is_async :], 1.0)
def reduce_and_wait():
    dist.all_reduce(mine, async_op=True).wait()
def reduce():
    dist.all_reduce(mine)
call = reduce_and_wait if is_async else reduce
for turn in range(12):
    for word in best:
        with tempfile.TemporaryDirectory() as folder:
            if word != "off":
                rank_sanitizer.of_process.prepare(True)
                rank_sanitizer.of_process.begin(0, read_kinds(word), None, Path(folder, "log"))
            for part in range(3):
                began = time.thread_time()
                for _ in range(500):
                    call()
                best[word] = min(best[word], (time.thread_time() - began) / 500)
            rank_sanitizer.of_process.finish()
            rank_sanitizer.of_process.prepare(False)
for word, seconds in best.items():
    print(word, 1e6 * seconds)
"""


# Prints the CPU time of an all_reduce in rank 0 of three, in microseconds, for each word of its arguments.
AMONG_RANKS = """
import contextlib, os, statistics, sys, tempfile, time
from pathlib import Path
import torch, torch.distributed as dist
from torch_testing_ext._torch.groups import watched_groups
from torch_testing_ext._collectives.sanitizer import rank_sanitizer
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import read_kinds
from torch_testing_ext.launch.causes import is_of_lost_peer
def run(rank, folder):
    torch.set_num_threads(1)
    watched_groups.watch_process_groups(lambda name: contextlib.nullcontext(), is_of_lost_peer)
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 3), rank=rank, world_size=3)
    mine, times = torch.ones(4), {word: [] for word in sys.argv[1:]}
    for turn in range(12):
        for word in times:
            if word != "off":
                rank_sanitizer.of_process.prepare(True)
                rank_sanitizer.of_process.begin(rank, read_kinds(word), None, Path(folder, f"log{rank}"))
            dist.barrier()
            began = time.thread_time()
            for _ in range(200):
                dist.all_reduce(mine)
            times[word].append((time.thread_time() - began) / 200)
            rank_sanitizer.of_process.finish()
            rank_sanitizer.of_process.prepare(False)
            dist.barrier()
    if rank == 0:
        for word, seconds in times.items():
            print(word, 1e6 * statistics.median(seconds), flush=True)
with tempfile.TemporaryDirectory() as folder:
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            run(rank, folder)
            os._exit(0)
        children.append(child)
    assert not any(os.waitpid(child, 0)[1] for child in children)
"""


# Prints the CPU time of calls in microseconds, outside of a block of traffic and in one, in turns.
IN_BLOCK = """
import time
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch_testing_ext.traffic import traffic
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mine, weight = torch.ones(4), torch.ones(8, 8)
class Layer(torch.nn.Module):
    def forward(self, given):
        dist.all_reduce(given)
model = torch.nn.Sequential(torch.nn.Sequential(Layer()))
calls = {
    "all_reduce": lambda: dist.all_reduce(mine),
    "async": lambda: dist.all_reduce(mine, async_op=True).wait(),
    "functional": lambda: functional.wait_tensor(functional.all_reduce(mine, "sum", dist.group.WORLD)),
    "in_a_module": lambda: model(mine),
    "matmul": lambda: weight @ weight,
}
best = {(word, name): 1.0 for name in calls for word in ("without", "traffic")}
def measure(word):
    for name, call in calls.items():
        began = time.thread_time()
        for _ in range(300):
            call()
        best[word, name] = min(best[word, name], (time.thread_time() - began) / 300)
for turn in range(20):
    measure("without")
    with traffic(model):
        measure("traffic")
for (word, name), seconds in best.items():
    print(f"{word}:{name}", 1e6 * seconds)
"""


def micros_of(program: str, words: list[str]) -> dict[str, float]:
    """The microseconds that a program prints for each word."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return {word: float(number) for word, number in (line.split() for line in done.stdout.splitlines())}


def sanitizer() -> int:
    """Measure the sanitizer's cost for a rank with each kind of checks."""
    words = ["off", "calls", "default", "calls,nan", "calls,poison"]
    micros = micros_of(HOT, words)
    print(*(f"{word:>14}: {number:5.1f} us a collective" for word, number in micros.items()), sep="\n")
    hot_async = micros_of(HOT, ["async", *words[:3]])
    for word, number in hot_async.items():
        print(f"{word:>14}: {number:5.1f} us a collective with async_op, and its wait")
    among_ranks = micros_of(AMONG_RANKS, words[:3])
    for word, number in among_ranks.items():
        print(f"{word:>14}: {number:5.1f} us a collective among three ranks")
    targets = [
        Target("a collective with --sanitize, CPU, us more", micros["default"] - micros["off"], MOST_US),
        Target("one with async_op, and its wait, CPU, us more", hot_async["default"] - hot_async["off"], MOST_US),
    ]
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


def traffic() -> int:
    """Measure what blocks of `traffic` cost their rank: each collective, and each other operation."""
    micros = micros_of(IN_BLOCK, [])
    targets = []
    for name in dict.fromkeys(word.partition(":")[2] for word in micros):
        without, within = micros[f"without:{name}"], micros[f"traffic:{name}"]
        print(f"{name:>14}: {without:5.1f} us without, {within:5.1f} us in a block")
        if name != "matmul":
            targets.append(Target(f"{name} in a block, CPU, us more", within - without, MOST_US_OF_TRAFFIC))
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


def environment(folder: Path, name: str, code: str) -> dict[str, str]:
    place = folder / name
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}


def cpu_of(pid: int) -> float:
    """The CPU time of a process, of all that it has waited for, and of those that it still has, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_of(int(child)) for child in children)


def one_test(environments: dict[str, dict[str, str]], folder: Path, rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of one test after the first ones, by candidate, of ten tests at a time."""
    subject = folder / "subject.py"
    subject.write_text(SUBJECT)
    running = {
        name: subprocess.Popen(
            [sys.executable, str(subject)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, env in environments.items()
    }
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds // 10 + 1):
        # Each goes first in every other round: what one leaves to be cleaned up costs the next.
        for name, process in sorted(running.items(), reverse=bool(turn % 2)):
            assert process.stdin is not None and process.stdout is not None
            before = cpu_of(process.pid)
            for _ in range(10):
                process.stdin.write("go\n")
                process.stdin.flush()
                process.stdout.readline()
            if turn:
                times[name].append(100 * (cpu_of(process.pid) - before))
    for process in running.values():
        process.communicate()
    return {name: statistics.median(each) for name, each in times.items()}


def suites(environments: dict[str, dict[str, str]], files: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a run of the files, wall and CPU, by candidate."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in environments}
    for turn in range(rounds + 1):
        for name, env in environments.items():
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, str(ROOT / "run_test.py"), *files]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if turn:  # the first run of each fills the caches
                found[name].append((wall, cpu))
    columns = {name: list(zip(*rows, strict=True)) for name, rows in found.items()}
    return {name: (statistics.median(wall), statistics.median(cpu)) for name, (wall, cpu) in columns.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of the suites per candidate")
    parser.add_argument("--files", nargs="+", default=[SUITES], help="the suites to run")
    parser.add_argument("--quick", action="store_true", help="one suite, three rounds")
    parser.add_argument("--one-test", action="store_true", help="one test of 4 ranks, and no suites")
    parser.add_argument("--sanitizer", action="store_true", help="a collective with --sanitize")
    parser.add_argument("--traffic", action="store_true", help="a collective in a block of traffic")
    arguments = parser.parse_args()
    if arguments.traffic:
        return traffic()
    if arguments.sanitizer:
        return sanitizer()
    files, rounds = ([QUICK], 3) if arguments.quick else (arguments.files, arguments.rounds)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        environments = {name: environment(folder, name, code) for name, code in (("without", WITHOUT), ("with", WITH))}
        sanitized = environment(folder, "sanitized", WITH)
        environments["sanitized"] = {**sanitized, "TORCH_TESTING_EXT_SANITIZE": "default"}
        test = one_test(environments, folder, 20 * rounds)
        whole = {} if arguments.one_test else suites(environments, files, rounds)
    of_one_test = Target(
        "one test of 4 ranks with 10 collectives, CPU, ms more", test["with"] - test["without"], MOST_MS
    )
    if arguments.one_test:
        for name, milliseconds in test.items():
            print(f"{name:>9}: one test of 4 ranks {milliseconds:.2f} ms of CPU")
        print(of_one_test)
        return 0 if of_one_test.reached else 1
    for name, (wall, cpu) in whole.items():
        print(f"{name:>9}: one test of 4 ranks {test[name]:.2f} ms of CPU; suites {wall:.2f} s, CPU {cpu:.2f} s")
    more, more_sanitized = (
        [100 * (whole[name][at] / whole["without"][at] - 1) for at in (0, 1)] for name in ("with", "sanitized")
    )
    targets = [
        of_one_test,
        Target("suites, wall, % more", more[0], MOST_PERCENT),
        Target("suites, CPU, % more", more[1], MOST_PERCENT),
        Target("suites with --sanitize, CPU, % more", more_sanitized[1], MOST_PERCENT_SANITIZED),
    ]
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
