"""GPUs and their current use, as NVML knows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ComputeMode(Enum):
    """The processes that may use a GPU."""

    DEFAULT = "default"
    # One process at a time.
    EXCLUSIVE_PROCESS = "exclusive process"
    PROHIBITED = "prohibited"


@dataclass(frozen=True)
class Gpu:
    """Facts about one GPU that do not change."""

    # NVML's: in the order of the PCI bus, without regard to masks.
    index: int
    # "GPU-...".
    uuid: str
    # "NVIDIA H100 80GB HBM3".
    name: str = ""
    # The bytes of its memory.
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    # The UUIDs of the GPUs that NVLink connects it to, directly or through switches.
    nvlinks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GpuProcess:
    """A process that has a context on a GPU."""

    pid: int
    # The bytes that it has; None if the driver does not say.
    memory: int | None = None


@dataclass(frozen=True)
class Usage:
    """The current use of one GPU."""

    # The bytes in use; None if the GPU does not answer.
    memory: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    # The reason why it does not answer, such as "GPU is lost".
    trouble: str = ""
