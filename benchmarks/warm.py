"""Measure the time from saving a test file to its verdict: with a warm server, and cold, in turns.

    python benchmarks/warm.py [--rounds N] [--cold-rounds N]

Each round saves a changed test of two ranks and runs it by `torchtest`. The exit code is 1 if the warm median or the
worst warm run misses its target, or if a verdict does not belong to the saved file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import Target

WORDS = ("-m", "torch_testing_ext", "test_x")
MEDIAN, WORST = 0.3, 0.6
TEST = """
import torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase


class SavedTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), EXPECTED)
"""


class Project:
    """A project with one test, which changes before every run."""

    def __init__(self, folder: Path):
        self._folder, self._saved = folder, 0
        (folder / "test").mkdir()
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        kept = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTHONDONTWRITEBYTECODE")}
        self._environ = {**kept, "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": path}
        self._environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")  # as users have it, but not in their folders

    def save_and_run(self, *options: str, **environ: str) -> float:
        """The time from saving the test, which passes and fails in turns, to the end of its run."""
        self._saved += 1
        fails = self._saved % 2
        text = TEST.replace("EXPECTED", str(2 + fails))
        # A compiled file does not tell sources of one size and second apart.
        text += "#" * self._saved
        command = [sys.executable, *WORDS, *options]
        began = time.perf_counter()
        (self._folder / "test" / "test_x.py").write_text(text)
        env = {**self._environ, **environ}
        code = subprocess.run(command, cwd=self._folder, env=env, capture_output=True, check=False).returncode
        seconds = time.perf_counter() - began
        if bool(code) != bool(fails):
            expected = "fail" if fails else "pass"
            raise SystemExit(f"{' '.join(command)}: exit code {code} for a test that should {expected}")
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="warm runs; 100 by default")
    parser.add_argument("--cold-rounds", type=int, default=5, help="cold runs; 5 by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        # The server starts.
        for _ in range(2):
            project.save_and_run("--warm")
        warm, cold = [], []
        for number in range(options.rounds):
            warm.append(project.save_and_run("--warm"))
            if number * options.cold_rounds // options.rounds == len(cold):
                # In CI, a run uses no server that it is not told to use; `--warm=off` would end the one that runs.
                cold.append(project.save_and_run(CI="1"))
        project.save_and_run("--warm=off")
    median, worst = statistics.median(warm), max(warm)
    print(f"warm {median:.2f} s, worst {worst:.2f} s; cold {statistics.median(cold):.2f} s")
    targets = [Target("warm, median", median, MEDIAN, " s"), Target("warm, worst", worst, WORST, " s")]
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
