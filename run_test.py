#!/usr/bin/env python3
"""Run the distributed tests on the available devices and cores: `python run_test.py --help`."""

import os
import sys
from pathlib import Path

from torch_testing_ext.runner.cli import main

# One thread of torch for each rank, as under torchrun: a rank takes one slot. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHECKOUT = Path(__file__).resolve().parent
GO_ON = (
    "These suites have found faults in torch: docs/found/README.md. This run as a page: --html run.html. "
    "Your own project: docs/use-it.md"
)


def is_first_look(words: list[str]) -> bool:
    """Is this the README's main command, in a checkout of this project?"""
    return not words and Path(CHECKOUT, "docs", "found").is_dir()


if __name__ == "__main__":
    is_first = is_first_look(sys.argv[1:])
    if is_first and not sys.stdout.isatty():
        # On a terminal, the live display says so.
        print("importing torch and the suites", flush=True)
    code = main(sys.argv[1:], CHECKOUT, as_pytorch=True)
    if is_first:
        print(GO_ON, flush=True)
    sys.exit(code)
