"""The device that the FSDP helpers use: the machine's accelerator, or the CPU if there is none.

`use` keeps a rank on the CPU, for a test that needs more devices than the machine has and allows the CPU. Importing
this module asks no driver; the first call does.
"""

from __future__ import annotations

import time
from enum import Enum, auto

import torch
from torch import nn

from torch_testing_ext import _torch
from torch_testing_ext._machine import accelerators

_chosen: str | None = None


class DEVICEInitMode(Enum):
    """When a test model moves to the device: before FSDP wraps it, after that, or never."""

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()


def use(device_type: str) -> None:
    """Let this process keep its models on `device_type`."""
    global _chosen
    _chosen = device_type


def device_type() -> str:
    return _chosen or accelerators.accelerator_type() or "cpu"


def device_count() -> int:
    """Return the number of devices of that type; 1 for the CPU."""
    return 1 if device_type() == "cpu" else accelerators.device_count()


def backend() -> str:
    """Return the default backend of that device: nccl, xccl, hccl, ..., gloo."""
    return torch.distributed.get_default_backend_for_device(device_type())


def compute_device(rank: int) -> torch.device:
    """Return the device on which rank `rank` computes."""
    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, rank % device_count())


def place(module: nn.Module, mode: DEVICEInitMode, now: DEVICEInitMode) -> nn.Module:
    """Move `module` to the device if `mode` equals `now`."""
    return module.to(device_type()) if mode is now else module


def delay(milliseconds: float) -> None:
    """Keep the device busy for this time. On CUDA the stream waits and the host goes on, as after a slow kernel."""
    if milliseconds <= 0 or device_type() == "cpu":
        return
    if device_type() == "cuda":
        _torch.cuda_spin(milliseconds)
    else:
        time.sleep(milliseconds / 1000)
