"""Compiled tests: CPU and wall time of a suite whose ranks compile by inductor, start to exit.

    python benchmarks/compiled.py [--rounds N] [--against CHECKOUT] [--file FILE] [TEST ...]

The peer is the same suite with ranks that prepare for compiling each by themselves; with `--against`, the suite and the
kit of another checkout. Both take turns, after one run each that fills inductor's folder of built kernels. CPU time is
that of all processes together. With `--against`, the exit code is 1 if ours needs more than half of the peer's.
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

ROOT = Path(__file__).resolve().parents[1]
SUITE = Path("test/distributed/_composable/test_replicate_with_compiler.py")
TARGET = 0.5

# Runs a test file whose ranks are forked from a process that has only imported the compiler.
BY_THEMSELVES = """
import runpy, sys
from torch_testing_ext._cases import ranked
from torch_testing_ext._torch import DYNAMO, INDUCTOR
ranked.expected_imports = lambda file: (DYNAMO, INDUCTOR)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cpu_time() -> float:
    """The CPU time of all processes that this one has waited for, and of those that they have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: list[str], checkout: Path, kernels: str) -> tuple[float, float]:
    """Run a suite of a checkout; returns its CPU and wall time."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCHINDUCTOR_CACHE_DIR": kernels}
    began, used = time.perf_counter(), cpu_time()
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the suite failed in {checkout}:\n{done.stdout}{done.stderr}")
    return cpu_time() - used, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="by default, all of the suite")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs; 3 by default")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, as the peer")
    parser.add_argument("--file", type=Path, default=SUITE, help=f"the suite; {SUITE} by default")
    options = parser.parse_args()
    suite = [str(options.file), *options.tests]
    sides = {"ours": ([sys.executable, *suite], ROOT)}
    if options.against is not None:
        sides["peer"] = [sys.executable, *suite], options.against.resolve()
    else:
        sides["peer"] = [sys.executable, "-c", BY_THEMSELVES, *suite], ROOT
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as kernels:
        for number in range(options.rounds + 1):
            for name, (command, checkout) in sides.items():
                seconds = measure(command, checkout, kernels)
                print(f"{name}: {seconds[0]:.1f} s of CPU, {seconds[1]:.1f} s", "" if number else "(first)", flush=True)
                if number:
                    times[name].append(seconds)
    ratios = []
    for kind, place in (("CPU", 0), ("wall", 1)):
        ours, peer = (statistics.median(each[place] for each in times[name]) for name in sides)
        ratios.append(ours / peer)
        print(f"{kind}: ours {ours:.1f} s, peer {peer:.1f} s, ratio {ours / peer:.2f}")
    return int(options.against is not None and ratios[0] > TARGET)


if __name__ == "__main__":
    sys.exit(main())
