#!/usr/bin/env python3
"""Run the distributed tests on the available devices and cores: `python run_test.py --help`."""

import sys
from pathlib import Path

from torch_testing_ext.runner.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
