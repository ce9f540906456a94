"""What this machine has, as one line of JSON: versions of all that matters, and the devices."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "expecttest",
    "hypothesis",
    "pytest",
    "rich",
    "triton",
    "nvidia-ml-py",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


def main() -> None:
    facts: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
        "python": sys.version.split()[0],
    }
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    if "expecttest" not in facts and importlib.util.find_spec("expecttest"):
        facts["expecttest"] = "carried"
    with suppress(OSError):
        facts["driver"] = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].partition(":")[2].strip()
    with suppress(metadata.PackageNotFoundError):
        facts["torch"] = metadata.version("torch")
    say(facts)
    if not any(Path("/dev").glob("nvidia*")) and not any(Path(name).exists() for name in ("/dev/dxg", "/dev/kfd")):
        return  # nothing that torch could find
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    facts["torch"] = torch.__version__
    facts["cuda"] = str(torch.version.cuda)
    say(facts)
    if torch.cuda.is_available():
        with suppress(Exception):
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["devices"] = [device(number) for number in range(torch.cuda.device_count())]
    elif os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        facts["trouble"] = "there are files of devices, and torch cannot use any"
    say(facts)


def device(number: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(number)
    return {
        "name": found.name,
        "memory": f"{found.total_memory / 2**30:.1f} GiB",
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def say(facts: dict[str, Any]) -> None:
    os.write(int(os.environ["GPU_CHECK_LINES"]), (json.dumps({"facts": facts}) + "\n").encode())


main()
