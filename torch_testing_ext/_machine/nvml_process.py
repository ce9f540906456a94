"""The process that asks NVML, by the functions of `pynvml` (the package nvidia-ml-py). It ends with its client."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch_testing_ext._process import system, user_commands
from torch_testing_ext._process.channel import Channel

from . import nvml

T = TypeVar("T")

# Indices of NVML's peer-to-peer capabilities. In pynvml, the name of the first is a tuple by mistake.
_P2P_READ, _P2P_NVLINK = 0, 2
_COMPUTE_MODES = {2: nvml.ComputeMode.PROHIBITED, 3: nvml.ComputeMode.EXCLUSIVE_PROCESS}
_NUMA_WORDS = 16  # of 64 bits


class Library:
    """NVML, initialised."""

    def __init__(self, pynvml: Any):
        self._pynvml = pynvml
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._handles = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}

    def gpus(self) -> tuple[nvml.Gpu, ...]:
        return tuple(self._gpu(index, uuid, self._handles) for index, uuid in enumerate(self._handles))

    def usage(self) -> Mapping[str, nvml.Usage]:
        found = {}
        for uuid, handle in self._handles.items():
            found[uuid] = self._usage(handle)
            for instance in self._instances(handle):
                found[str(self._pynvml.nvmlDeviceGetUUID(instance))] = self._usage(instance)
        return found

    def _gpu(self, index: int, uuid: str, handles: Mapping[str, Any]) -> nvml.Gpu:
        library, handle = self._pynvml, handles[uuid]
        return nvml.Gpu(
            index,
            uuid,
            self._optional(lambda: str(library.nvmlDeviceGetName(handle)), ""),
            self._optional(lambda: str(library.nvmlDeviceGetPciInfo(handle).busId), ""),
            self._optional(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total), 0),
            self._optional(lambda: _pair(library.nvmlDeviceGetCudaComputeCapability(handle)), (0, 0)),
            _COMPUTE_MODES.get(
                self._optional(lambda: int(library.nvmlDeviceGetComputeMode(handle)), 0), nvml.ComputeMode.DEFAULT
            ),
            self._optional(lambda: self._numa_node(handle), None),
            self._optional(lambda: bool(library.nvmlDeviceGetMigMode(handle)[0]), False),
            tuple(self._instance(instance) for instance in self._instances(handle)),
            {other: self._link(handle, handles[other]) for other in handles if other != uuid},
        )

    def _numa_node(self, handle: Any) -> int | None:
        words = self._pynvml.nvmlDeviceGetMemoryAffinity(handle, _NUMA_WORDS, 0)  # 0: the nearest NUMA nodes
        nodes = [word * 64 + bit for word in range(_NUMA_WORDS) for bit in range(64) if words[word] >> bit & 1]
        return nodes[0] if len(nodes) == 1 else None

    def _link(self, one: Any, other: Any) -> nvml.GpuLink:
        library = self._pynvml

        def status(capability: int) -> bool:
            return bool(library.nvmlDeviceGetP2PStatus(one, other, capability) == library.NVML_P2P_STATUS_OK)

        return nvml.GpuLink(
            self._optional(lambda: status(_P2P_NVLINK), False),
            self._optional(lambda: status(_P2P_READ), False),
            self._optional(lambda: int(library.nvmlDeviceGetTopologyCommonAncestor(one, other)), 50),
        )

    def _instances(self, handle: Any) -> Iterator[Any]:
        for index in range(self._optional(lambda: int(self._pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)):
            found = self._optional(lambda: self._pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), None)  # noqa: B023
            if found is not None:
                yield found

    def _instance(self, handle: Any) -> nvml.MigInstance:
        memory = self._optional(lambda: int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0)
        return nvml.MigInstance(str(self._pynvml.nvmlDeviceGetUUID(handle)), memory)

    def _usage(self, handle: Any) -> nvml.Usage:
        try:
            memory = int(self._pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._pynvml.NVMLError as error:
            return nvml.Usage(trouble=str(error))
        return nvml.Usage(memory, tuple(self._processes(handle)))

    def _processes(self, handle: Any) -> Iterable[nvml.GpuProcess]:
        compute: list[Any] = self._optional(lambda: self._pynvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
        graphics: list[Any] = self._optional(lambda: self._pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle), [])
        # A process may be in both lists, with the same memory.
        return {one.pid: nvml.GpuProcess(one.pid, one.usedGpuMemory) for one in (*graphics, *compute)}.values()

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
    except Exception as error:  # NVMLError, or whatever a library of another version causes
        return _refusal(error)


def _refusal(error: Exception) -> nvml.Answer:
    return nvml.Answer(refusal=f"NVML: {' '.join(str(error).split()) or type(error).__name__}")


def main() -> None:
    """Run as `-c "...main()" DESCRIPTOR PARENT`; the parent sends questions."""
    system.die_with(int(sys.argv[2]), signal.SIGKILL)
    channel: Channel[nvml.Question] = Channel.on(int(sys.argv[1]), nvml.Question)
    library = _load()
    try:
        while True:
            for question in channel.receive():
                channel.send(library if isinstance(library, nvml.Answer) else _tried(library, question))
    except EOFError:
        return


def _tried(library: Library, question: nvml.Question) -> nvml.Answer:
    try:
        return nvml.Answer(usage=library.usage()) if question.is_for_usage else nvml.Answer(library.gpus())
    except Exception as error:  # a GPU that is lost, or a library of another version
        return _refusal(error)
