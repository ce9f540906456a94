"""Machines with GPUs that do not exist: what NVML would say, for a stand-in of pynvml or as our own types."""

import dataclasses
import json
import os
import unittest
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._machine.nvml import Gpu

STAND_IN = Path(__file__).resolve().parent / "recorded_nvml"
GB = 1 << 30


def uuid(index):
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


@dataclass
class Device:
    """One GPU, as the stand-in reads it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GB
    used: int = 0
    capability: tuple = (9, 0)
    compute_mode: int = 0
    processes: list = field(default_factory=list)  # each has a `pid` and a `usedGpuMemory`
    trouble: str = ""


@dataclass
class Machine:
    """What the stand-in of pynvml answers. `write` it again to change its answers."""

    gpus: list
    nvlinks: list = field(default_factory=list)  # pairs of indices
    fails_in: dict = field(default_factory=dict)  # the error of each function that fails
    hangs_in: str | None = None  # the function that never returns

    def write(self, file):
        draft = Path(f"{file}.draft")
        draft.write_text(json.dumps(dataclasses.asdict(self)))
        draft.replace(file)


def environment(file):
    """What a process needs in order to import the stand-in instead of pynvml."""
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "RECORDED_NVML": str(file)}


def linked(count, *islands):
    """GPUs of our own types, of which those of one island are joined by NVLink."""

    def others(index):
        return {other for island in islands if index in island for other in island} - {index}

    return tuple(Gpu(index, uuid(index), nvlinks=frozenset(map(uuid, others(index)))) for index in range(count))


class NvmlTestCase(unittest.TestCase):
    """Has a folder for the machine's file."""

    def setUp(self):
        import tempfile

        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name) / "machine.json"
