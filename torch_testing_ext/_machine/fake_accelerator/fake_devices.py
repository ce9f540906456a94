"""The numbers and properties of fake accelerators."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from torch_testing_ext._machine.fake_accelerator.shared_memory import uuid_of

from .fake_library import accelerator, library


def current_device() -> int:
    """Return the number of the current device."""
    return int(accelerator.current_device_index())


def index_of(device: Any) -> int:
    """The number of a device, which may be a number, a name or a device; of the current one for None."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else int(index)


def set_device(device: Any) -> None:
    """Make a device the current one; nothing for a negative number, as in torch.cuda."""
    if (index := index_of(device)) >= 0:
        accelerator.set_device_index(index)


class device(contextlib.ContextDecorator):
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def device_count() -> int:
    """Return the number of devices that this process sees."""
    return len(library.visible())


def is_available() -> bool:
    """Whether there are devices."""
    return device_count() > 0


def init() -> None:
    """Use the devices: the number of them is fixed then, and forks of this process cannot use any."""
    library.start()


_lazy_init = init


def is_initialized() -> bool:
    """Whether this process has used the devices."""
    return bool(library.is_started())


def _is_in_bad_fork() -> bool:
    return bool(library.is_bad_fork())


@dataclass(frozen=True)
class Properties:
    """The properties of a device."""

    uuid: str
    total_memory: int
    name: str = "Fake accelerator"
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def get_device_properties(device: Any = None) -> Properties:
    """Return the properties of a device. Asking for them does not use it."""
    numbers = library.visible()
    index = index_of(device)
    if not 0 <= index < len(numbers):
        raise RuntimeError(f"invalid device ordinal {index}: there are {len(numbers)} fake accelerators")
    return Properties(uuid_of(numbers[index]), int(mem_get_info(index)[1]))


def get_device_name(device: Any = None) -> str:
    """Return the name of a device."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return (0, 0): tests that need a capability of CUDA's skip."""
    return 0, 0


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return False: no device can read another's memory."""
    return False


def is_bf16_supported() -> bool:
    """Return True: the CPU computes with it."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may use."""
    return [torch.float16, torch.bfloat16, torch.float32]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total memory of a device, which the processes of a run share."""
    free, total = library.memory_info(index_of(device))
    return free, total
