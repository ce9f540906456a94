"""`torch.fakeacc`: what torch and tests ask of the module of a device, as they ask it of `torch.cuda`."""

import contextlib
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from torch_testing_ext._machine.fake_accelerator.building import FakeAcceleratorError, load_library
from torch_testing_ext._machine.fake_accelerator.shared_memory import uuid_of

from . import KIND

_library = load_library(torch.__version__)
# Its stubs differ between versions.
_accelerator: Any = torch.accelerator
Stream = torch.Stream
Event = torch.Event


# -- devices


def current_device() -> int:
    """Return the number of the current device."""
    return int(_accelerator.current_device_index())


def _index_of(device: Any) -> int:
    """The number of a device, which may be a number, a name or a device; of the current one for None."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else int(index)


def set_device(device: Any) -> None:
    """Make a device the current one; nothing for a negative number, as in torch.cuda."""
    if (index := _index_of(device)) >= 0:
        _accelerator.set_device_index(index)


class device(contextlib.ContextDecorator):
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def device_count() -> int:
    """Return the number of devices that this process sees."""
    return len(_library.visible())


def is_available() -> bool:
    """Whether there are devices."""
    return device_count() > 0


def init() -> None:
    """Use the devices: the number of them is fixed then, and forks of this process cannot use any."""
    _library.start()


_lazy_init = init


def is_initialized() -> bool:
    """Whether this process has used the devices."""
    return bool(_library.is_started())


def _is_in_bad_fork() -> bool:
    return bool(_library.is_bad_fork())


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
    numbers = _library.visible()
    index = _index_of(device)
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


# -- streams: all work is done at once, which is kept from those who do not wait if streams are late


def set_late_streams(late: bool) -> None:
    """Let work that a stream has not waited for give wrong numbers there, as it may on hardware."""
    _library.set_late_streams(late)


def _sleep(cycles: int) -> None:
    """Do nothing, where other devices keep the current stream busy: a late stream is late without."""


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device."""
    _accelerator.synchronize(_index_of(device))


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device."""
    stream: torch.Stream = _accelerator.current_stream(_index_of(device))
    return stream


def default_stream(device: Any = None) -> torch.Stream:
    """Return the default stream of a device."""
    stream: torch.Stream = _library.default_stream(_index_of(device))
    return stream


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device."""
    _accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:
    """Return a context in which a stream is the current one; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


# -- memory


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total memory of a device, which the processes of a run share."""
    free, total = _library.memory_info(_index_of(device))
    return free, total


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Return the statistics of this process's memory on a device."""
    return dict(_accelerator.memory_stats(_index_of(device)))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that the tensors of this process have on a device."""
    return int(memory_stats(device).get("allocated_bytes.all.current", 0))


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that the tensors of this process have had on a device."""
    return int(memory_stats(device).get("allocated_bytes.all.peak", 0))


# Nothing is kept for later.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peak start again."""
    _accelerator.reset_peak_memory_stats(_index_of(device))


def empty_cache() -> None:
    """Do nothing: nothing is kept."""


# -- torch.compile


class _NoCompiler:
    """Raises when inductor first uses it as one of the code generators that a device's module has."""

    def __call__(self, *_: object) -> NoReturn:
        raise FakeAcceleratorError(
            "torch.compile's backend inductor has no code for fake accelerators: use backend='aot_eager' or 'eager', "
            "or compile on the CPU"
        )

    supports_caching = property(__call__)


# Inductor takes them when it is first used, also for the CPU, and uses them for a tensor of this device.
Scheduling = PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = _NoCompiler()


# -- random numbers


def _generator(device: Any = None) -> torch.Generator:
    generator: torch.Generator = _library.default_generator(_index_of(device))
    return generator


def get_rng_state(device: Any = KIND) -> torch.Tensor:
    """Return the state of the random numbers of a device."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = KIND) -> None:
    """Set the state of the random numbers of a device."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of all devices."""
    for number, state in enumerate(new_states):
        set_rng_state(state, number)


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _generator().initial_seed()


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices. Does not use them."""
    for number in range(device_count()):
        _generator(number).manual_seed(int(seed))
