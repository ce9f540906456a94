#!/usr/bin/env python3
"""Run the distributed tests on the available devices and cores: `python run_test.py --help`."""

import os
import sys
from pathlib import Path

from torch_testing_ext.runner.cli import main

# One thread of torch for each rank, as under torchrun: a rank takes one slot. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
