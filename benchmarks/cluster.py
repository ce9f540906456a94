"""Measures what --cluster adds to a run: milliseconds a unit, seconds to the first test, and a flood of logs.

    python benchmarks/cluster.py [--tests N] [--rounds N]

Starts a Ray cluster with one node on this machine, with as many CPUs as the local run has slots, and runs the same
tests there and locally, in turns, so that other work on the machine slows both alike. Needs Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLOTS = 2
TARGETS = {"a unit": 3.0, "first test": 3.0, "100 MB of logs": 3.0}  # ms, s, s more than locally
RUN = "import sys; from pathlib import Path; from torch_testing_ext.runner.cli import main\n"
RUN += "sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))\n"
CLUSTER = """
import os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="120", RAY_worker_niceness="0")
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={
    "node_ip_address": "127.0.0.2", "temp_dir": sys.argv[1], "include_dashboard": False, "num_cpus": int(sys.argv[2]),
    "object_store_memory": 80 << 20})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def write_project(folder: Path, tests: int) -> None:
    (folder / "test").mkdir(parents=True)
    (folder / "run_test.py").write_text(RUN)
    small = "".join(f"    def test_{number}(self): pass\n" for number in range(tests))
    (folder / "test" / "test_small.py").write_text(f"import unittest\nclass T(unittest.TestCase):\n{small}")
    flood = "".join(f"    def test_{number}(self): print(('x' * 99 + chr(10)) * 100_000)\n" for number in range(10))
    (folder / "test" / "test_flood.py").write_text(f"import unittest\nclass T(unittest.TestCase):\n{flood}")


def run(folder: Path, file: str, *argv: str) -> tuple[float, float, float]:
    """Milliseconds a unit, seconds until the first test began, and seconds of the whole run after that."""
    results = folder / "results.json"
    began = time.time()
    words = [sys.executable, "run_test.py", "-q", "-otests=test", f"-j{SLOTS}", f"--results={results}", *argv, file]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    subprocess.run(words, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(results.read_text())
    attempts = [test["attempts"][0] for test in found["tests"]]
    first = min(attempt["began"] for attempt in attempts)
    last = max(attempt["began"] + attempt["seconds"] for attempt in attempts)
    return (last - first) * 1e3 / len(attempts), found["began"] + first - began, last - first


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what --cluster adds to a run.")
    parser.add_argument("--tests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    more: dict[str, list[float]] = {name: [] for name in TARGETS}
    # Short: Ray's sockets are below it.
    with tempfile.TemporaryDirectory(prefix="tte_", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary, "project")
        write_project(folder, arguments.tests)
        Path(temporary, "ray").mkdir()  # in TMPDIR, Ray expects it
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": temporary}
        cluster = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, temporary, str(SLOTS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True,
        )  # fmt: skip
        assert cluster.stdin is not None and cluster.stdout is not None
        try:
            on_cluster = ("--cluster", cluster.stdout.readline().strip())
            for number in range(arguments.rounds):
                unit, first, _ = run(folder, "test_small")
                their_unit, their_first, _ = run(folder, "test_small", *on_cluster)
                flood, their_flood = run(folder, "test_flood")[2], run(folder, "test_flood", *on_cluster)[2]
                print(f"round {number + 1}: a unit {unit:.1f} / {their_unit:.1f} ms, first test {first:.1f} / "
                      f"{their_first:.1f} s, 100 MB of logs {flood:.1f} / {their_flood:.1f} s", flush=True)  # fmt: skip
                more["a unit"].append(their_unit - unit)
                more["first test"].append(their_first - first)
                more["100 MB of logs"].append(their_flood - flood)
        finally:
            cluster.stdin.close()
            cluster.wait()
    met = True
    for name, target in TARGETS.items():
        found = statistics.median(more[name])
        met &= found <= target
        print(f"{name}: {found:+.2f}, target {target} at most: {'met' if found <= target else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
