"""Measure tests of 4 ranks under pytest, ours against other ways to start them, and the plugin's cost without any.

    python benchmarks/pytest.py [--tests N] [--rounds N] [--quick] [--plugin]

Each way runs the same tests, in a session of pytest of its own; the ways take turns. What isolates the tests is tried:
a rank is killed, and ranks leave state behind. The last table lists the targets; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # another benchmark imports the package of this name, and finds this file first
    _all = sys.path[:]
    sys.path[:] = [entry for entry in _all if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    del sys.modules[__name__]
    importlib.import_module(__name__)
    sys.path[:] = _all

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "torch_testing_ext.pytest_plugin"
RANKS = 4
# Seconds for a rank that never answers, where a way has such a limit: for usual tests, and when a rank is killed.
LIMIT, LIMIT_OF_CRASH = "600", "40"

# What every rank of every test does.
BODY = """
import os, signal
import torch
import torch.distributed as dist

def rendezvous(rank, world_size, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

def body(what, keeps_group=False):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if what == "crash" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        torch.left_behind = True
    if what == "look":
        assert not hasattr(torch, "left_behind")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    if not keeps_group:
        dist.destroy_process_group()
"""
PORT = """
import socket

def open_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
"""
TESTS = """
import os
import pytest

count = int(os.environ.get("TESTS") or 0)
number = pytest.mark.parametrize("what", ["pass"] * count or ["crash", "pass", "leave", "look"])
"""
OURS = """
from body import body

@pytest.mark.world_size({ranks})
@number
def test_it(what):
    body(what)
"""
SPAWN = """
import torch.multiprocessing as mp
from body import body, rendezvous
from port import open_port

def worker(rank, port, what):
    rendezvous(rank, {ranks}, port)
    body(what)

@number
def test_it(what):
    mp.spawn(worker, args=(open_port(), what), nprocs={ranks})
"""
TORCHRUN = """
import subprocess, sys

@number
def test_it(what):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}", "script.py"]
    done = subprocess.run([*command, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
"""
SCRIPT = """
import sys
from body import body

body(sys.argv[1])
"""
# DeepSpeed's way in miniature: a pool off Python's fork server for each test, or one for all tests (reuse_dist_env).
POOL = """
import multiprocessing
from body import body, rendezvous
from port import open_port

context = multiprocessing.get_context("forkserver")
pools = []

def worker(rank, port, what):
    import torch.distributed as dist
    if not dist.is_initialized():
        rendezvous(rank, {ranks}, port)
    body(what, {reuses})

@number
def test_it(what):
    pool = pools.pop() if pools else context.Pool({ranks})
    results = pool.starmap_async(worker, [(rank, port, what) for port in [open_port()] for rank in range({ranks})], 1)
    try:
        results.get(float(os.environ["LIMIT"]))
    except multiprocessing.TimeoutError:
        pool.terminate()
        pytest.exit("Test hanged, exiting", returncode=1)
    if {reuses}:
        pools.append(pool)
    else:
        pool.terminate()
"""


@dataclass(frozen=True)
class Way:
    """A way to start the ranks of a test."""

    title: str
    source: str
    is_quick: bool = False  # so that as many tests as asked for take no time


WAYS = {
    "ours": Way("the mark world_size", OURS, is_quick=True),
    "spawn": Way("torch.multiprocessing.spawn", SPAWN),
    "torchrun": Way("torchrun in a subprocess", TORCHRUN),
    "pool": Way("DeepSpeed's pool for each test", POOL),
    "reused pool": Way("DeepSpeed's pool, reused", POOL, is_quick=True),
}


@dataclass(frozen=True)
class Session:
    """What a session of pytest came to. By test: outcome, seconds, message."""

    seconds: float
    cpu: float  # seconds of CPU time
    tests: list[tuple[str, float, str]]
    text: str


def write_files(folder: Path) -> None:
    Path(folder, "body.py").write_text(BODY)
    Path(folder, "port.py").write_text(PORT)
    Path(folder, "script.py").write_text(SCRIPT)
    for name, way in WAYS.items():
        words = {"{ranks}": str(RANKS), "{reuses}": str(name == "reused pool")}
        source = TESTS + way.source
        for word, value in words.items():
            source = source.replace(word, value)
        Path(folder, f"test_{name.replace(' ', '_')}.py").write_text(source)


def run_pytest(folder: Path, *words: str, plugin: str = PLUGIN, **variables: str) -> Session:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"LIMIT": LIMIT, **variables}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, *(["-p", plugin] if plugin else [])]
    command = [sys.executable, "-m", "pytest", *options, *words]
    began, cpu_before = time.perf_counter(), _cpu_of_children()
    done = subprocess.run(
        [*command, f"--junitxml={report}"], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    seconds, cpu = time.perf_counter() - began, _cpu_of_children() - cpu_before
    tests = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = [each for each in case if each.tag in ("failure", "error", "skipped")]
        message = "".join(f"{each.get('message')}\n{each.text}" for each in kinds)
        tests.append((kinds[0].tag if kinds else "passed", float(case.get("time") or 0), message))
    return Session(seconds, cpu, tests, done.stdout + done.stderr)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# -- tests of ranks


def measure_ways(folder: Path, tests: int, few: int, rounds: int) -> dict[str, float]:
    """Seconds for a test after the first one, by way: the median of all sessions' medians."""
    medians: dict[str, list[float]] = {name: [] for name in WAYS}
    names = list(WAYS)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            count = tests if WAYS[name].is_quick else few
            session = run_pytest(folder, f"test_{name.replace(' ', '_')}.py", TESTS=str(count))
            if [outcome for outcome, _, _ in session.tests] != ["passed"] * count:
                raise SystemExit(f"{WAYS[name].title} failed:\n{session.text}")
            medians[name].append(statistics.median(seconds for _, seconds, _ in session.tests[1:]))
    return {name: statistics.median(values) for name, values in medians.items()}


def describe_isolation(folder: Path, name: str) -> tuple[str, str]:
    """Kill a rank, and leave state behind: what becomes of this test and of the next ones."""
    file = f"test_{name.replace(' ', '_')}.py"
    crash = run_pytest(folder, file, "-k", "crash or pass", TESTS="", LIMIT=LIMIT_OF_CRASH)
    if "Exit: " in crash.text:
        ended = f"the run stopped, after {crash.seconds:.1f} s"
    else:
        outcome, seconds, message = crash.tests[0] if crash.tests else ("lost", crash.seconds, "")
        is_named = bool(re.search(r"\brank 1\b.*SIGKILL|process 1 .*SIGKILL|local_rank: 1\b", message, re.DOTALL))
        what = "rank named" if is_named else "rank not named" if outcome != "passed" else "PASSED"
        after = crash.tests[1][0] if len(crash.tests) > 1 else "not run"
        ended = f"{what} after {seconds:.1f} s, next test {after}"
    left = run_pytest(folder, file, "-k", "leave or look", TESTS="")
    outcomes = [outcome for outcome, _, _ in left.tests]
    if len(outcomes) != 2 or outcomes[0] != "passed":
        raise SystemExit(f"{WAYS[name].title}: no two tests\n{left.text}")
    return ended, "no" if outcomes[1] == "passed" else "yes"


# -- a session without ranks


def install(folder: Path) -> None:
    """Install the package into a folder as users have it: pytest reads the list of all its files."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(ROOT)], check=True)


def measure_plain(folder: Path, installed: Path, tests: int, rounds: int) -> tuple[float, float]:
    """Run plain tests with and without the package, in turns: the medians of the ratios, and of the milliseconds added.

    In CPU time, which other work disturbs less.
    """
    source = "import pytest\n\n@pytest.mark.parametrize('number', range({}))\ndef test_it(number):\n    assert True\n"
    Path(folder, "test_plain.py").write_text(source.format(tests))
    ratios, differences, times = [], [], []
    for number in range(rounds + 1):
        seconds = {}
        for is_installed in (True, False) if number % 2 else (False, True):
            # pytest finds an installed package by itself. A checkout may be installed, too.
            plugin, path = ("", installed) if is_installed else (f"no:{PLUGIN}", folder)
            seconds[is_installed] = run_pytest(folder, "test_plain.py", plugin=plugin, PYTHONPATH=str(path)).cpu
        if number == 0:
            continue  # it writes the bytecode
        ratios.append(seconds[True] / seconds[False])
        differences.append((seconds[True] - seconds[False]) * 1000)
        times.append(seconds[False] * 1000)
    ratio, added, without = (statistics.median(values) for values in (ratios, differences, times))
    print(f"\nplain tests, {tests}: {without:.0f} ms of CPU time, {added:+.0f} ms with the plugin (times {ratio:.3f})")
    return ratio, added


def targets_of_ranks(launch: Any, folder: Path, tests: int, few: int, rounds: int) -> list[object]:
    """Measure all ways to start ranks, and show what isolates their tests."""
    write_files(folder)
    medians = measure_ways(folder, tests, few, rounds)
    print(f"\n{RANKS} ranks that reduce one number")
    print(f"  {'':<34}{'a test':>9}{'ratio':>8}  {'state left':<12}one rank killed")
    for name, way in WAYS.items():
        ended, leaks = describe_isolation(folder, name)
        ratio = medians[name] / medians["ours"]
        print(f"  {way.title:<34}{medians[name] * 1000:>6.0f} ms{ratio:>8.1f}  {leaks:<12}{ended}")
        if name == "ours":
            is_isolated = leaks == "no" and "rank named" in ended and "next test passed" in ended
    slow = min(medians[name] / medians["ours"] for name in ("spawn", "torchrun", "pool"))
    return [
        launch.Target("4 ranks: the fastest way with fresh ranks / ours", slow, 10, at_least=True),
        launch.Target("4 ranks, ours: a killed rank is named, nothing leaks", float(is_isolated), 1, at_least=True),
    ]


def targets_of_the_plugin(launch: Any, folder: Path, rounds: int) -> list[object]:
    """Measure what the plugin adds to a run without tests of ranks."""
    installed = folder / "installed"
    install(installed)
    ratio, _ = measure_plain(folder, installed, 1000, rounds)
    _, added = measure_plain(folder, installed, 1, rounds)
    return [
        launch.Target("1000 plain tests: with the plugin / without", ratio, 1.05),
        launch.Target("one plain test: what the plugin adds", added, 30, " ms"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=30, metavar="N", help="run N tests in each way (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="run N sessions in each way (default: 3)")
    parser.add_argument("--quick", action="store_true", help="run 3 tests in the slow ways, and one session in each")
    parser.add_argument("--plugin", action="store_true", help="measure only the plugin's cost in a run without ranks")
    options = parser.parse_args()
    few, rounds = (min(3, options.tests), 1) if options.quick else (options.tests, options.rounds)

    launch = _launch()
    print(launch.describe_machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        targets = [] if options.plugin else targets_of_ranks(launch, folder, options.tests, few, rounds)
        targets += targets_of_the_plugin(launch, folder, 5 if options.quick else 15)
    print(f"\n  {'Targets':<62}{'measured':>9}\n" + "\n".join(map(str, targets)))
    return 0 if all(target.reached for target in targets) else 1


def _launch() -> Any:
    """The module launch.py next to this file, whose folder is not searched for modules."""
    spec = importlib.util.spec_from_file_location("launch_benchmark", Path(__file__).with_name("launch.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
