"""A program whose ranks lease the only device: `program.py holds` waits for an event, `program.py passes` does not."""

import sys
from pathlib import Path

import torch

from torch_testing_ext.ranks import spawn


def holds(rank):
    Path("is_held").write_text(torch.fakeacc.get_device_properties(0).uuid)
    Path("let_go").read_text()


def passes(rank):
    torch.ones(1, device="fakeacc")
    Path("has_run").touch()


if __name__ == "__main__":
    spawn({"holds": holds, "passes": passes}[sys.argv[1]], 1, devices=1)
