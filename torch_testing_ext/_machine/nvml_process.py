"""The process that asks NVML, by the functions of `pynvml` (the package nvidia-ml-py). It ends with its client."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch_testing_ext._process import system, user_commands
from torch_testing_ext._process.channels import Channel

from . import nvml

T = TypeVar("T")

# The index of NVML's capability of two GPUs to read each other's memory by NVLink.
_P2P_NVLINK = 2
_COMPUTE_MODES = {2: nvml.ComputeMode.PROHIBITED, 3: nvml.ComputeMode.EXCLUSIVE_PROCESS}


class Library:
    """NVML, initialised."""

    def __init__(self, pynvml: Any):
        self._pynvml = pynvml
        pynvml.nvmlInit()
        # By UUID.
        self._handles: dict[str, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._handles[self._uuid(handle)] = handle

    def gpus(self) -> tuple[nvml.Gpu, ...]:
        return tuple(self._gpu(index, uuid) for index, uuid in enumerate(self._handles))

    def usage(self) -> Mapping[str, nvml.Usage]:
        return {uuid: self._usage(handle) for uuid, handle in self._handles.items()}

    def _uuid(self, handle: Any) -> str:
        return str(self._pynvml.nvmlDeviceGetUUID(handle))

    def _gpu(self, index: int, uuid: str) -> nvml.Gpu:
        """Ask for all facts about a GPU; a fact that it does not have, or does not tell, has its default."""
        library = self._pynvml
        handle = self._handles[uuid]
        compute_mode = self._optional(lambda: int(library.nvmlDeviceGetComputeMode(handle)), 0)
        return nvml.Gpu(
            index=index,
            uuid=uuid,
            name=self._optional(lambda: str(library.nvmlDeviceGetName(handle)), ""),
            pci_bus=self._optional(lambda: str(library.nvmlDeviceGetPciInfo(handle).busId), ""),
            memory=self._memory(handle),
            capability=self._optional(lambda: _pair(library.nvmlDeviceGetCudaComputeCapability(handle)), (0, 0)),
            compute_mode=_COMPUTE_MODES.get(compute_mode, nvml.ComputeMode.DEFAULT),
            nvlinks=frozenset(other for other in self._handles if other != uuid and self._has_nvlink(uuid, other)),
        )

    def _memory(self, handle: Any) -> int:
        return self._optional(lambda: int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0)

    def _has_nvlink(self, uuid: str, other: str) -> bool:
        library = self._pynvml
        handles = self._handles[uuid], self._handles[other]
        status = self._optional(lambda: library.nvmlDeviceGetP2PStatus(*handles, _P2P_NVLINK), None)
        return bool(status == library.NVML_P2P_STATUS_OK)

    def _usage(self, handle: Any) -> nvml.Usage:
        try:
            memory = int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._pynvml.NVMLError as error:
            return nvml.Usage(trouble=str(error))
        return nvml.Usage(memory, tuple(self._processes(handle)))

    def _processes(self, handle: Any) -> Iterable[nvml.GpuProcess]:
        library = self._pynvml
        compute: list[Any] = self._optional(lambda: library.nvmlDeviceGetComputeRunningProcesses(handle), [])
        graphics: list[Any] = self._optional(lambda: library.nvmlDeviceGetGraphicsRunningProcesses(handle), [])
        # A process may be in both lists, with the same memory.
        by_pid = {}
        for process in (*graphics, *compute):
            by_pid[process.pid] = nvml.GpuProcess(process.pid, process.usedGpuMemory)
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


def _load() -> Library | nvml.Answer:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return nvml.Answer(refusal=f"the package nvidia-ml-py is not installed ({user_commands.install('gpu')})")
    try:
        return Library(pynvml)
    except Exception as error:
        # NVMLError, or whatever a library of another version causes.
        return _refusal(error)


def _refusal(error: Exception) -> nvml.Answer:
    text = " ".join(str(error).split())
    return nvml.Answer(refusal=f"NVML: {text or type(error).__name__}")


def main() -> None:
    """Run as `-c "...main()" DESCRIPTOR PARENT`; the parent sends questions."""
    _, descriptor, parent = sys.argv
    system.die_with(int(parent), signal.SIGKILL)
    channel: Channel[nvml.Question] = Channel.on(int(descriptor), nvml.Question)
    library = _load()
    try:
        while True:
            for question in channel.receive():
                channel.send(_answer(library, question))
    except EOFError:
        return


def _answer(library: Library | nvml.Answer, question: nvml.Question) -> nvml.Answer:
    """The answer to a question; always the same refusal if the library could not be loaded."""
    if isinstance(library, nvml.Answer):
        return library
    try:
        if question.is_for_usage:
            return nvml.Answer(usage=library.usage())
        return nvml.Answer(gpus=library.gpus())
    except Exception as error:
        # A GPU that is lost, or a library of another version.
        return _refusal(error)
