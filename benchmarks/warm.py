"""Measure the time from saving a test file to its verdict: with a warm server, and cold, in turns.

    python benchmarks/warm.py [--rounds N] [--cold-rounds N]

Each round saves a changed test of two ranks and runs it by `python test_x.py`, by pytest and by the runner. The exit
code is 1 if a warm median or the worst warm run misses its target, or if a verdict does not belong to the saved file.
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

WARM = ("-m", "torch_testing_ext.warm")
KINDS = {
    "test_x.py": ("test/test_x.py",),
    "pytest test_x.py": ("-m", "pytest", "-q", "test/test_x.py"),
    "runner test_x": ("-m", "torch_testing_ext", "test_x"),
}
MEDIAN, WORST = 0.3, 0.6
TEST = """
import torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


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


if __name__ == "__main__":
    run_tests()
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

    def run(self, *words: str) -> int:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self._folder, env=self._environ, capture_output=True, check=False).returncode

    def save_and_run(self, *words: str) -> float:
        """The time from saving the test, which passes and fails in turns, to the end of its run."""
        self._saved += 1
        fails = self._saved % 2
        text = TEST.replace("EXPECTED", str(2 + fails))
        text += "#" * self._saved  # a compiled file does not tell sources of one size and second apart
        began = time.perf_counter()
        (self._folder / "test" / "test_x.py").write_text(text)
        code = self.run(*words)
        seconds = time.perf_counter() - began
        if bool(code) != bool(fails):
            raise SystemExit(
                f"{' '.join(words)}: exit code {code} for a test that should {'fail' if fails else 'pass'}"
            )
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="warm runs of each kind; 100 by default")
    parser.add_argument("--cold-rounds", type=int, default=5, help="cold runs of each kind; 5 by default")
    options = parser.parse_args()
    targets = []
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        try:
            for kind, words in KINDS.items():
                by_runner = kind.startswith("runner")
                warm_words = (*words, "--warm") if by_runner else (*WARM, *words)
                cold_words = (*words, "--warm=off") if by_runner else words
                for _ in range(2):  # the server starts, and makes its stages
                    project.save_and_run(*warm_words)
                warm, cold = [], []
                for number in range(options.rounds):
                    warm.append(project.save_and_run(*warm_words))
                    if number * options.cold_rounds // options.rounds == len(cold):
                        cold.append(project.save_and_run(*cold_words))
                median, worst = statistics.median(warm), max(warm)
                print(f"{kind:<18} warm {median:.2f} s, worst {worst:.2f} s; cold {statistics.median(cold):.2f} s")
                targets.append(Target(f"{kind}: warm, median", median, MEDIAN, " s"))
                targets.append(Target(f"{kind}: warm, worst", worst, WORST, " s"))
        finally:
            project.run(*WARM, "stop")
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
