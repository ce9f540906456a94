"""Compare whole test files of other projects' kind on PyTorch's bases and on ours: `python file.py`, start to exit.

    python benchmarks/clients.py [--rounds N] [FILE ...]

The files in clients/ are written for PyTorch's bases. For ours, only the names of the modules they import are changed.
Both take turns; the outcomes must be the same. The exit code is 1 if they are not, or if the median of the files'
ratios misses the target.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = Path(__file__).resolve().parent / "clients"
TARGET = 12.0


def timed(file: Path) -> tuple[float, str]:
    """Run a test file; returns its wall time and the line in which unittest sums it up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - began
    ran = re.search(r"Ran (\d+) tests?", done.stderr)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    if done.returncode != 0 or ran is None:
        raise SystemExit(f"{file.name} failed:\n{done.stdout}{done.stderr}")
    return seconds, f"{ran[1]} tests, {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="by default, all in clients/")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs; 3 by default")
    options = parser.parse_args()
    ratios, same = [], True
    print(f"{'':<18}{'PyTorch':>10}{'ours':>9}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for theirs in options.files or sorted(CLIENTS.glob("*.py")):
            ours = Path(folder, theirs.name)
            ours.write_text(theirs.read_text().replace("torch.testing._internal", "torch_testing_ext"))
            taken: dict[Path, list[float]] = {theirs: [], ours: []}
            outcomes: dict[Path, str] = {}
            for _ in range(options.rounds):
                for file in (theirs, ours):
                    seconds, outcomes[file] = timed(file)
                    taken[file].append(seconds)
            slow, fast = (statistics.median(taken[file]) for file in (theirs, ours))
            ratios.append(slow / fast)
            print(f"{theirs.stem:<18}{slow:>8.1f} s{fast:>7.2f} s{slow / fast:>8.1f}  {outcomes[theirs]}", flush=True)
            if outcomes[theirs] != outcomes[ours]:
                same = False
                print(f"  on ours: {outcomes[ours]}")
    median = statistics.median(ratios)
    print(f"median ratio {median:.1f}, target {TARGET:.0f}: {'reached' if median >= TARGET else 'MISSED'}")
    return 0 if same and median >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
