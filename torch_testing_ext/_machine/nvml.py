"""Facts from NVML, and the GPUs that belong together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from torch_testing_ext._process import interpreters
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import wait_readable

from .device_rules import DeviceFacts, bare_uuid

# --------------------------------------------------------------------------------------------------------------------
# Facts from NVML, NVIDIA's management library, about the GPUs of this machine: memory, processes, links.
#
# A process of its own asks the library. A driver that does not answer blocks that process, never this one. Asking
# NVML creates no CUDA context and ignores CUDA_VISIBLE_DEVICES. The package `nvidia-ml-py` (the extra `gpu`) is
# needed.
#
# NVML numbers GPUs in the order of the PCI bus, CUDA by default the fastest first: compare UUIDs, never numbers. In a
# container, its pids are those of the host. `open_nvml` returns something to ask; tests pass anything with its
# methods.

# Without persistence mode, the driver initialises the GPUs again for each first client: seconds on large machines.
ANSWER_TIMEOUT = 30.0


class NvmlError(Exception):
    """NVML cannot be asked, or does not answer; the text says why, in one line."""


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
    # "00000000:3B:00.0".
    pci_bus: str = ""
    # In bytes.
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    # The UUIDs of the GPUs that NVLink connects it to, directly or through switches.
    nvlinks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GpuProcess:
    """A process that has a context on a GPU."""

    pid: int
    # In bytes; None if the driver does not say.
    memory: int | None = None


@dataclass(frozen=True)
class Usage:
    """The current use of one GPU."""

    # In bytes; None if the GPU does not answer.
    memory: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    # Why it does not answer, such as "GPU is lost".
    trouble: str = ""


def may_have_nvidia_gpus(dev: Path = Path("/dev")) -> bool:
    """Could NVML find a GPU on this machine? False only where that is certain."""
    if any(dev.glob("nvidia[0-9]*")):
        return True
    return any((dev / name).exists() for name in ("nvidiactl", "dxg"))


def open_nvml(timeout: float = ANSWER_TIMEOUT) -> NvmlProcess:
    """Start asking. Raises NvmlError if the library, the driver or the Python package is missing or fails."""
    opened = NvmlProcess(timeout)
    try:
        opened.gpus()
    except NvmlError:
        opened.close()
        raise
    return opened


# -- the messages between this process and the one that asks the library


@dataclass(frozen=True)
class Question:
    """Asks for all GPUs, or for their current use."""

    is_for_usage: bool


@dataclass(frozen=True)
class Answer:
    """The answer; with a `refusal`, the library cannot be asked."""

    gpus: tuple[Gpu, ...] = ()
    # Of each device, by UUID.
    usage: Mapping[str, Usage] = field(default_factory=dict)
    refusal: str = ""


class NvmlProcess:
    """Asks NVML in a process that ends with this one or by `close`. A question without an answer raises NvmlError."""

    def __init__(
        self,
        timeout: float = ANSWER_TIMEOUT,
        path: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        """Start the process. `path`: its sys.path, by default that of this process."""
        self._timeout = timeout
        own, other = socket_pair()
        with other:
            self._channel: Channel[Answer] = Channel(own, Answer)
            words = [str(other.fileno()), str(os.getpid())]
            search_path = sys.path if path is None else path
            self._process = subprocess.Popen(
                interpreters.command("_machine.nvml_process", search_path, *words),
                env=environ,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._failure: str | None = None
        self._gpus: tuple[Gpu, ...] | None = None

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of the machine that this user can see, in NVML's order."""
        if self._gpus is None:
            self._gpus = self._ask(Question(is_for_usage=False)).gpus
        return self._gpus

    def usage(self) -> Mapping[str, Usage]:
        """The usage of each GPU, by UUID. Cheap enough to poll."""
        return self._ask(Question(is_for_usage=True)).usage

    def _ask(self, question: Question) -> Answer:
        if self._failure is not None:
            raise NvmlError(self._failure)
        self._channel.send(question)
        answer = self._receive()
        if answer.refusal:
            self._failure = answer.refusal
            raise NvmlError(answer.refusal)
        return answer

    def _receive(self) -> Answer:
        until = time.monotonic() + self._timeout
        received: list[Answer] = []
        while not received:
            if not wait_readable(self._channel, until):
                self._end()
                return Answer(refusal=f"the NVIDIA driver has not answered NVML within {self._timeout:g} s")
            try:
                received = self._channel.receive()
            except EOFError:
                return Answer(refusal="the process that asks NVML has died")
        return received[0]

    def close(self) -> None:
        self._failure = "NVML is closed"
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._channel.close()
        # A process that the driver blocks takes no signal: the kernel ends it once the driver answers.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)


# --------------------------------------------------------------------------------------------------------------------
# The GPUs of devices, and which of them NVLink connects. Pure, except for `with_nvlinks`, which asks NVML.


def gpus_by_name(
    names: Iterable[str], identities: Mapping[str, str], gpus: Sequence[Gpu], environ: Mapping[str, str]
) -> dict[str, Gpu]:
    """The GPU of each device, as far as it is known: by UUID, which may be abbreviated.

    CUDA's numbers are NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID, and without a mask.
    """
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_name = {}
    for name in names:
        matches = matching_gpus(identities.get(name, name), gpus)
        is_number = name.isdecimal() and name not in identities
        if len(matches) == 1:
            by_name[name] = matches[0]
        elif in_order and is_number and int(name) < len(gpus):
            by_name[name] = gpus[int(name)]
    return by_name


def matching_gpus(uuid: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with this UUID or one that begins so."""
    wanted = bare_uuid(uuid)
    if not wanted or uuid.isdecimal():
        return []
    return [gpu for gpu in gpus if bare_uuid(gpu.uuid).startswith(wanted)]


def nvlinks(names: Sequence[str], gpus: Mapping[str, Gpu]) -> list[tuple[int, ...] | None]:
    """For each device, the numbers of those that NVLink connects it to; None if it is not known."""
    known = {number: gpus[name] for number, name in enumerate(names) if name in gpus}
    links: list[tuple[int, ...] | None] = []
    for name in names:
        gpu = gpus.get(name)
        if gpu is None:
            links.append(None)
        else:
            linked = [number for number, other in known.items() if other.uuid in gpu.nvlinks]
            links.append(tuple(linked))
    return links


def with_nvlinks(
    facts: Sequence[DeviceFacts], uuids: Sequence[str], open_it: Callable[[], NvmlProcess] = open_nvml
) -> tuple[DeviceFacts, ...]:
    """The facts with the numbers of the devices that NVLink connects each to; as they are, where NVML does not say.

    `uuids`: of each device, as torch gives them, without the prefix that NVML's have.
    """
    if len(uuids) != len(facts) or len(facts) < 2:
        return tuple(facts)
    try:
        with closing(open_it()) as nvml:
            gpus = nvml.gpus()
    except NvmlError:
        return tuple(facts)
    linked = nvlinks(uuids, gpus_by_name(uuids, {}, gpus, {}))
    return tuple(replace(device, nvlinks=numbers) for device, numbers in zip(facts, linked, strict=True))


_EFFECTS = {
    ComputeMode.EXCLUSIVE_PROCESS: "only one process at a time can use it, and tests with several ranks on it fail",
    ComputeMode.PROHIBITED: "no process can use it",
}


def warnings_about_devices(gpus: Mapping[str, Gpu]) -> list[str]:
    """Warnings about the devices of a run, by name."""
    warnings = []
    for mode, effect in _EFFECTS.items():
        names = [name for name, gpu in gpus.items() if gpu.compute_mode is mode]
        if names:
            noun = "devices" if len(names) > 1 else "device"
            devices = f"{noun} {', '.join(names)}"
            remedy = "nvidia-smi -c DEFAULT changes it"
            warnings.append(f"the compute mode of {devices} is {mode.value}: {effect} ({remedy})")
    return warnings
