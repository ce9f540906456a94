"""NVML itself, asked by the functions of `pynvml` (the package nvidia-ml-py): only in a process of its own."""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch_testing_ext._process import user_commands

from .gpus import ComputeMode, Gpu, GpuProcess, Usage

T = TypeVar("T")

# The index of NVML's capability of two GPUs to read each other's memory by NVLink.
_P2P_NVLINK = 2
_COMPUTE_MODES = {2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}


class Library:
    """NVML, initialised."""

    def __init__(self, pynvml: Any):
        self._pynvml = pynvml
        pynvml.nvmlInit()
        # The handle of each GPU, by its UUID.
        self._handles: dict[str, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._handles[self._uuid(handle)] = handle

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(self._gpu(index, uuid) for index, uuid in enumerate(self._handles))

    def usage(self) -> Mapping[str, Usage]:
        return {uuid: self._usage(handle) for uuid, handle in self._handles.items()}

    def _uuid(self, handle: Any) -> str:
        return str(self._pynvml.nvmlDeviceGetUUID(handle))

    def _gpu(self, index: int, uuid: str) -> Gpu:
        """Ask for all facts about a GPU; a fact that it does not have, or does not tell, has its default."""
        library = self._pynvml
        handle = self._handles[uuid]
        compute_mode = self._optional(lambda: int(library.nvmlDeviceGetComputeMode(handle)), 0)
        return Gpu(
            index=index,
            uuid=uuid,
            name=self._optional(lambda: str(library.nvmlDeviceGetName(handle)), ""),
            memory=self._memory(handle),
            capability=self._optional(lambda: _pair(library.nvmlDeviceGetCudaComputeCapability(handle)), (0, 0)),
            compute_mode=_COMPUTE_MODES.get(compute_mode, ComputeMode.DEFAULT),
            nvlinks=frozenset(other for other in self._handles if other != uuid and self._has_nvlink(uuid, other)),
        )

    def _memory(self, handle: Any) -> int:
        return self._optional(lambda: int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0)

    def _has_nvlink(self, uuid: str, other: str) -> bool:
        library = self._pynvml
        handles = self._handles[uuid], self._handles[other]
        status = self._optional(lambda: library.nvmlDeviceGetP2PStatus(*handles, _P2P_NVLINK), None)
        return bool(status == library.NVML_P2P_STATUS_OK)

    def _usage(self, handle: Any) -> Usage:
        try:
            memory = int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._pynvml.NVMLError as error:
            return Usage(trouble=str(error))
        return Usage(memory, tuple(self._processes(handle)))

    def _processes(self, handle: Any) -> Iterable[GpuProcess]:
        library = self._pynvml
        compute: list[Any] = self._optional(lambda: library.nvmlDeviceGetComputeRunningProcesses(handle), [])
        graphics: list[Any] = self._optional(lambda: library.nvmlDeviceGetGraphicsRunningProcesses(handle), [])
        # A process may be in both lists, with the same memory.
        by_pid = {}
        for process in (*graphics, *compute):
            by_pid[process.pid] = GpuProcess(process.pid, process.usedGpuMemory)
        return by_pid.values()

    def _optional(self, ask: Callable[[], T], otherwise: T) -> T:
        """The answer to a question that not every GPU, driver or user gets answered."""
        try:
            return ask()
        except self._pynvml.NVMLError:
            return otherwise


def _pair(numbers: tuple[int, int]) -> tuple[int, int]:
    major, minor = numbers
    return int(major), int(minor)


def gpus() -> tuple[Gpu, ...]:
    """The answer of the library about all GPUs. Raises RuntimeError, which says why there is none."""
    return _ask(Library.gpus)


def usage() -> Mapping[str, Usage]:
    """The answer of the library about the current use of all GPUs. Raises RuntimeError likewise."""
    return _ask(Library.usage)


def _ask(question: Callable[[Library], T]) -> T:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        install = user_commands.install("gpu")
        raise RuntimeError(f"the package nvidia-ml-py is not installed ({install})") from None
    try:
        return question(_library(pynvml))
    except Exception as error:
        # NVMLError, as for a GPU that is lost, or whatever a library of another version causes.
        raise RuntimeError(f"NVML: {str(error) or type(error).__name__}") from None


@functools.cache
def _library(pynvml: Any) -> Library:
    return Library(pynvml)
