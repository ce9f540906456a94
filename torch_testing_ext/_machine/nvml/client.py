"""The client of NVML, NVIDIA's management library, which another process asks.

Asking NVML creates no CUDA context and ignores CUDA_VISIBLE_DEVICES. The package `nvidia-ml-py` (the extra `gpu`) is
needed.

NVML numbers GPUs in the order of the PCI bus, CUDA by default the fastest first: compare UUIDs, never numbers. In a
container, its pids are those of the host. `open_nvml` returns something to ask; tests pass anything with its methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_testing_ext._process.questions import By, NoAnswer, OtherProcess

from . import library
from .gpus import Gpu, Usage

# Without persistence mode, the driver initialises the GPUs again for each first client: seconds on large machines.
NVML_TIMEOUT = 30.0


def may_have_nvidia_gpus(dev: Path = Path("/dev")) -> bool:
    """Could NVML find a GPU on this machine? False only where that is certain."""
    if any(dev.glob("nvidia[0-9]*")):
        return True
    return any((dev / name).exists() for name in ("nvidiactl", "dxg"))


def open_nvml(timeout: float = NVML_TIMEOUT) -> Nvml:
    """Start asking. Raises NoAnswer if the library, the driver or the Python package is missing or fails."""
    opened = Nvml(timeout)
    try:
        opened.gpus()
    except NoAnswer:
        opened.close()
        raise
    return opened


class Nvml:
    """Asks NVML in a process that ends with this one or by `close`. A question without an answer raises NoAnswer."""

    def __init__(
        self,
        timeout: float = NVML_TIMEOUT,
        path: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        """Start the process. `path`: its sys.path, by default that of this process."""
        self._process = OtherProcess(By.INTERPRETER, "the NVIDIA driver", timeout, path, environ)
        self._gpus: tuple[Gpu, ...] | None = None

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of the machine that this user can see, in NVML's order."""
        if self._gpus is None:
            self._gpus = self._process.ask(library.gpus)
        return self._gpus

    def usage(self) -> Mapping[str, Usage]:
        """The usage of each GPU, by UUID. Cheap enough to poll."""
        return self._process.ask(library.usage)

    def close(self) -> None:
        self._process.close()
