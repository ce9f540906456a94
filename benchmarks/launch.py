"""Measure how fast ranks start and end, how much memory they use, and what importing the kit costs, against peers.

    python benchmarks/launch.py [--rounds N] [--world-sizes 1 2 4 ...] [--quick]

The candidates take turns within one run, so that other load on the machine slows all of them alike: compare the ratios
of their medians. The last table lists the targets; the exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUBJECT = HERE / "launch_subject.py"
OURS, TORCH, FORK = "torch_testing_ext", "torch.testing._internal", "fork"
CONTINUOUS, OUR_CONTINUOUS = "MultiProcContinuousTest", "our MultiProcContinuousTest"
MANY = 512
IMPORT = "import"
OURS_DESTROYING, FORK_DESTROYING, TORCH_DESTROYING = (f"{kit},destroying" for kit in (OURS, FORK, TORCH))
TITLES = {
    OURS: "ours",
    OURS_DESTROYING: "ours, destroying the group",
    FORK: "floor: bare fork loop",
    FORK_DESTROYING: "floor, destroying the group",
    CONTINUOUS: "MultiProcContinuousTest, after its start",
    OUR_CONTINUOUS: "our MultiProcContinuousTest, after its start",
    TORCH: "MultiProcessTestCase",
    TORCH_DESTROYING: "MultiProcessTestCase, destroying",
}
# A candidate that starts interpreters takes seconds per rank, so it gets few ranks.
MOST_RANKS = {
    OURS: 1000,
    OURS_DESTROYING: 1000,
    FORK: 1000,
    FORK_DESTROYING: 1000,
    CONTINUOUS: 8,
    OUR_CONTINUOUS: 8,
    TORCH: 4,
    TORCH_DESTROYING: 4,
}
# The first tests of an interpreter pay for its start, which measure_files covers. MultiProcessTestCase pays every time.
WARM_UPS = {**dict.fromkeys(TITLES, 3), TORCH: 0, TORCH_DESTROYING: 0}


@dataclass(frozen=True)
class Target:
    """A measured figure and its bound."""

    title: str
    measured: float
    bound: float
    unit: str = ""
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        word = "reached" if self.reached else "MISSED"
        return f"  {self.title:<62}{self.measured:>9.2f}  {sign} {self.bound:g}{self.unit:<4} {word}"


class Candidate:
    """An interpreter that runs the subject's test once for each line it reads."""

    def __init__(self, kit: str, ranks: int, pause_directory: Path):
        self.kit = kit
        self.ranks = ranks
        self.pause_directory = pause_directory
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(SUBJECT), "serve"],
            env=environment(kit, RANKS=ranks, PAUSE_DIRECTORY=pause_directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Candidate:
        for _ in range(WARM_UPS[self.kit]):
            self.run()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self.stderr.close()

    def run(self) -> float:
        self._begin()
        return self._end()

    def _begin(self) -> None:
        print("go", file=self.process.stdin, flush=True)

    def _end(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            self.stderr.seek(0)
            error = self.stderr.read().decode(errors="replace")
            raise SystemExit(f"{TITLES[self.kit]} failed with {self.ranks} ranks:\n{error}")
        return float(line)

    def memory_of_ranks(self) -> list[float]:
        """PSS of each rank in MB, read while all of them wait; a page that n processes share counts as 1/n."""
        ready, go = self.pause_directory / "ready", self.pause_directory / "go"
        os.mkfifo(ready)
        os.mkfifo(go)
        # Open both for reading and writing: neither side blocks until the other opens, and nothing written is lost.
        with open(ready, "r+b", buffering=0) as arrivals, open(go, "r+b", buffering=0) as releases:
            self._begin()
            pids: list[bytes] = []
            partial_line = b""
            while len(pids) < self.ranks:
                *more, partial_line = (partial_line + arrivals.read(4096)).split(b"\n")
                pids += more
            sizes = [pss(int(pid)) for pid in pids]
            ready.unlink()
            releases.write(b"." * self.ranks)
            self._end()
        go.unlink()
        return sizes


def environment(kit: str, **more: object) -> dict[str, str]:
    environ = {**os.environ, "KIT": kit, **{name: str(value) for name, value in more.items()}}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return with_bytecode(environ)


def with_bytecode(environ: dict[str, str]) -> dict[str, str]:
    """Installed packages come with their bytecode; let our modules write theirs, too."""
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"the kernel does not report the PSS of process {pid}")


@contextmanager
def candidates(ranks: int, kits: list[str]) -> Iterator[dict[str, Candidate]]:
    with ExitStack() as stack:
        started = {}
        for kit in kits:
            if ranks <= MOST_RANKS[kit]:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                started[kit] = stack.enter_context(Candidate(kit, ranks, directory))
        yield started


def take_turns(measurements: dict[str, Callable[[], float]], rounds: dict[str, int]) -> dict[str, float]:
    """The median of each measurement, taken in turns; each round starts with the next one."""
    seconds: dict[str, list[float]] = {name: [] for name in measurements}
    names = list(measurements)
    for number in range(max(rounds.values())):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number < rounds[name]:
                seconds[name].append(measurements[name]())
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_tests(world_sizes: list[int], rounds: int, slow_rounds: int) -> list[Target]:
    targets = []
    print(f"\nOne test, median in ms\n  {'ranks':<44}" + "".join(f"{size:>9}" for size in world_sizes))
    cells: dict[tuple[str, int], float] = {}
    for ranks in world_sizes:
        with candidates(ranks, list(TITLES)) as started:
            times = {kit: slow_rounds if kit in (TORCH, TORCH_DESTROYING) else rounds for kit in started}
            for kit, seconds in take_turns({kit: one.run for kit, one in started.items()}, times).items():
                cells[kit, ranks] = seconds
    for kit, title in TITLES.items():
        print(f"  {title:<44}" + "".join(in_ms(cells.get((kit, ranks))) for ranks in world_sizes))
    for kit, title in TITLES.items():
        if kit != OURS:
            ratios = (ratio(cells.get((kit, ranks)), cells[OURS, ranks]) for ranks in world_sizes)
            print(f"  {title + ' / ours':<44}" + "".join(ratios))
    if 4 in world_sizes:
        targets.append(Target("4 ranks: ours / floor", cells[OURS, 4] / cells[FORK, 4], 1.15))
        destroying = cells[OURS_DESTROYING, 4] / cells[FORK_DESTROYING, 4]
        targets.append(Target("4 ranks, destroying: ours / floor", destroying, 1.15))
        continuous = cells[OUR_CONTINUOUS, 4] / cells[CONTINUOUS, 4]
        targets.append(Target("4 ranks: our MultiProcContinuousTest / PyTorch's", continuous, 1))
    return targets


def in_ms(seconds: float | None) -> str:
    return f"{'-' if seconds is None else format(seconds * 1000, '.1f'):>9}"


def ratio(theirs: float | None, ours: float) -> str:
    return f"{'-' if theirs is None else format(theirs / ours, '.2f'):>9}"


def measure_memory() -> list[Target]:
    print("\nMemory per rank, PSS in MB: median (largest)")
    largest = 0.0
    for ranks in (4, 32):
        with candidates(ranks, [OURS, FORK, TORCH]) as started:
            for kit, one in started.items():
                sizes = one.memory_of_ranks()
                print(f"  {ranks:>2} ranks, {TITLES[kit]:<34}{statistics.median(sizes):>9.1f} ({max(sizes):.1f})")
                if kit == OURS:
                    largest = max(sizes)
    return [Target("32 ranks: largest rank's PSS", largest, 25, " MB")]


def measure_many() -> list[Target]:
    with candidates(64, [OURS]) as started:
        seconds = [started[OURS].run() for _ in range(3)]  # a failed test ends the benchmark
    print(f"\n64 ranks, ours: {statistics.median(seconds) * 1000:.0f} ms per test")
    return [Target("64 ranks: tests passed out of 3", len(seconds), 3, at_least=True), *measure_largest()]


def measure_largest() -> list[Target]:
    """The same number of ranks in ever larger worlds: ranks alone, with gloo's full mesh, with connections as needed.

    The CPU time of all processes counts: with so many ranks, wall time is that of the whole machine.
    """
    print(f"\n{MANY} ranks in files of equal tests: CPU time of a rank in ms, and the file's wall time in s")
    kinds = {
        "ranks that only pass": {"ALONE": 1},
        "full mesh": {"TORCH_GLOO_LAZY_INIT": 0},
        "TORCH_GLOO_LAZY_INIT=1": {"TORCH_GLOO_LAZY_INIT": 1},
    }
    grown = {}
    for title, settings in kinds.items():
        each, cells = {}, []
        for ranks in (4, 64, 256):
            before = cpu_of_children()
            tests = MANY // ranks
            seconds = run_interpreter([str(SUBJECT)], environment(OURS, RANKS=ranks, TESTS=tests, **settings))
            each[ranks] = (cpu_of_children() - before) / MANY * 1000
            cells.append(f"{ranks:>3} a test: {each[ranks]:5.1f} ms, {seconds:4.1f} s")
        print(f"  {title:<24}{'; '.join(cells)}", flush=True)
        grown[title] = each[256] / each[4]
    # What grows in the others is gloo's: each rank has connections, and steps of a sum, for each other one.
    alone, *_ = kinds
    return [Target(f"CPU of a rank of 256 / of 4, {alone}", grown[alone], 1)]


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_files(rounds: int) -> list[Target]:
    runners = {kit: file_runner(kit, tests=1) for kit in (OURS, TORCH)}
    runners[IMPORT] = lambda: run_interpreter(["-c", "import torch, torch.distributed"], environment(OURS))
    one = take_turns(runners, {OURS: 3 * rounds, IMPORT: 3 * rounds, TORCH: rounds})
    thirty = take_turns(
        {kit: file_runner(kit, tests=30) for kit in (OURS, CONTINUOUS, OUR_CONTINUOUS)},
        dict.fromkeys((OURS, CONTINUOUS, OUR_CONTINUOUS), rounds),
    )
    print("\nWhole file with 4 ranks in a new interpreter, start-up included, median in s")
    print(f"  1 test:   ours {one[OURS]:.2f}, MultiProcessTestCase {one[TORCH]:.2f}, only imports {one[IMPORT]:.2f}")
    continuous = f"MultiProcContinuousTest {thirty[CONTINUOUS]:.2f}, ours {thirty[OUR_CONTINUOUS]:.2f}"
    print(f"  30 tests: ours {thirty[OURS]:.2f}, {continuous}")
    return [
        Target("file with 1 test: ours / MultiProcessTestCase", one[OURS] / one[TORCH], 1),
        Target("file with 1 test: ours / import torch, torch.distributed", one[OURS] / one[IMPORT], 1.1),
        Target("file with 30 tests: ours / MultiProcContinuousTest", thirty[OURS] / thirty[CONTINUOUS], 1),
        Target("the same: our MultiProcContinuousTest / PyTorch's", thirty[OUR_CONTINUOUS] / thirty[CONTINUOUS], 1),
    ]


def file_runner(kit: str, tests: int) -> Callable[[], float]:
    return lambda: run_interpreter([str(SUBJECT)], environment(kit, TESTS=tests))


def run_interpreter(arguments: list[str], environ: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stdout}{done.stderr}")
    return seconds


def measure_skip() -> list[Target]:
    command = [sys.executable, str(SUBJECT), "count-starts-for-a-skip"]
    done = subprocess.run(command, env=environment(OURS), check=True, stdout=subprocess.PIPE, text=True)
    return [Target("test skipped, not enough devices: processes started", int(done.stdout), 0)]


def measure_imports(rounds: int) -> list[Target]:
    """Import our three main modules, and PyTorch's, in new interpreters that have imported torch. CPU time counts."""
    modules = ("common_utils", "common_distributed", "distributed.fake_pg")
    costs: dict[str, list[float]] = {OURS: [], TORCH: []}
    for number in range(-1, rounds):  # the first writes the bytecode
        for kit in costs:
            if kit == OURS or number < max(3, rounds // 5):
                names = ", ".join(f"{kit}.{name}" for name in modules)
                code = f"import time, torch.distributed; began = time.process_time(); import {names}"
                command = [sys.executable, "-c", f"{code}; print(time.process_time() - began)"]
                done = subprocess.run(command, env=environment(kit), check=True, stdout=subprocess.PIPE, text=True)
                costs[kit] += [float(done.stdout)] if number >= 0 else []
    ours, theirs = (statistics.median(costs[kit]) * 1000 for kit in (OURS, TORCH))
    print("\nImporting common_utils, common_distributed and distributed.fake_pg on top of torch.distributed, ms of CPU")
    print(f"  ours {ours:.0f}, PyTorch's {theirs:.0f}")
    return [Target("importing our modules", ours, 60, " ms")]


def describe_machine() -> str:
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return f"torch {torch}, Python {platform.python_version()}, {cores} cores, load {os.getloadavg()[0]:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=40, metavar="N", help="run the test N times per candidate (default: 40)"
    )
    parser.add_argument(
        "--world-sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="measure with these numbers of ranks (default: 1 2 4 8 16 32)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run few rounds with 4 ranks only: rough results in about two minutes"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.world_sizes = 10, [4]
    slow_rounds, file_rounds, import_rounds = (1, 1, 5) if options.quick else (3, 3, 25)

    print(describe_machine())
    targets = measure_tests(options.world_sizes, options.rounds, slow_rounds)
    targets += measure_files(file_rounds)
    targets += measure_memory()
    targets += measure_many()
    targets += measure_skip()
    targets += measure_imports(import_rounds)
    print(f"\n  {'Targets':<62}{'measured':>9}\n" + "\n".join(map(str, targets)))
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
