"""The needs of a test: devices, ranks, backends."""

import functools
import os
import sys
import unittest
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as c10d

from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.device_rules import NCCL, NO_NEEDS, DeviceFacts, DeviceNeeds, read_bytes, uses_nccl

# --------------------------------------------------------------------------------------------------------------------
# The needs of a test, stored on its function, where the parent and a runner read them before any rank starts.

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "_torch_testing_ext_needs"


class TestSkip(NamedTuple):
    """The reason for a skip, and the exit code by which a rank reports it."""

    exit_code: int
    message: str


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}s" if count > 1 else f"{count} {noun}"


def _devices_skip(count: int, exit_code: int) -> TestSkip:
    return TestSkip(exit_code, f"Need at least {_plural(count, 'accelerator device')}")


_DEVICE_CODES = {1: 75, 2: 77, 3: 80, 4: 81, 5: 82, 6: 83, 7: 84, 8: 85}
_GENERIC = 86
_MISSING_DEVICES = {
    74: "a CUDA device",
    89: "an accelerator",
    **{code: _plural(count, "device") for count, code in _DEVICE_CODES.items()},
}

TEST_SKIPS: dict[str, TestSkip] = {
    "backend_unavailable": TestSkip(72, "The distributed backend is not available"),
    "small_worldsize": TestSkip(73, "The world size is too small"),
    "no_cuda": TestSkip(74, "CUDA is not available"),
    "nccl": TestSkip(76, "torch was built without NCCL"),
    "skipIfRocm": TestSkip(78, "Does not run on ROCm"),
    "no_peer_access": TestSkip(79, "The devices have no peer access"),
    "generic": TestSkip(_GENERIC, "Skipped in the ranks; their logs may say why"),
    "odd_worldsize": TestSkip(87, "The world size is odd"),
    "importerror": TestSkip(88, "An import is missing"),
    "no_accelerator": TestSkip(89, "No accelerator is available"),
    **{f"multi-device-{n}": _devices_skip(n, code) for n, code in _DEVICE_CODES.items()},
    **{f"multi-gpu-{n}": _devices_skip(n, code) for n, code in _DEVICE_CODES.items()},
}
SKIP_BY_CODE = {skip.exit_code: skip for skip in TEST_SKIPS.values()}


def too_few_devices(count: int) -> TestSkip:
    """The skip for any number of devices; above 8 with the generic exit code."""
    return _devices_skip(count, _DEVICE_CODES.get(count, _GENERIC))


class Skipped(unittest.SkipTest):
    """A SkipTest that carries the exit code of the rank."""

    def __init__(self, skip: TestSkip):
        super().__init__(skip.message)
        self.exit_code = skip.exit_code

    @property
    def want(self) -> str | None:
        """The accelerators that the test needs, where too few are the reason for the skip."""
        return _MISSING_DEVICES.get(self.exit_code)


@dataclass(frozen=True)
class Need:
    """One thing that a test needs. `unmet()` returns the skip where this machine lacks it.

    A runner reads `devices`, `allow_cpu`, `backend`, `world_size` and `of_devices` to lease devices before it starts a
    test.
    """

    unmet: Callable[[], TestSkip | None]
    devices: int = 0
    allow_cpu: bool = False
    backend: str | None = None
    world_size: int | None = None
    of_devices: DeviceNeeds = NO_NEEDS

    def devices_of(self, available: int) -> int:
        """Count the accelerators that the test uses of `available`: more than there are if it skips."""
        return 0 if self.allow_cpu and available == 0 else self.devices


def devices(count: int, allow_cpu: bool = False) -> Need:
    """Accelerators for at least `count` ranks. With `allow_cpu`, a machine without any meets the need, too."""

    def unmet() -> TestSkip | None:
        available = accelerators.most_ranks()
        return None if available >= need.devices_of(available) else too_few_devices(count)

    need = Need(unmet, devices=count, allow_cpu=allow_cpu)
    return need


# The need that each wrapper of `requires` checks: other decorators copy the attributes of what they wrap.
_checked_by: weakref.WeakKeyDictionary[Any, Need] = weakref.WeakKeyDictionary()


def requires(need: Need) -> Callable[[F], F]:
    """Decorator: skip the test where the need is unmet, in the parent where possible."""

    def decorate(func: F) -> F:
        """Decorate a test, or each test of a class."""
        if isinstance(func, type):
            return each_test(func, decorate)  # type: ignore[no-any-return]  # mypy makes it any type

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            skip = need.unmet()
            if skip is None:
                return func(*args, **kwargs)
            # The test's class may handle a skip itself.
            handle = getattr(args[0], "_handle_test_skip", None) if args else None
            if handle is None:
                raise Skipped(skip)
            handle(skip.message)
            return None

        all_needs = (need, *needs_of(func))
        setattr(wrapper, ATTRIBUTE, all_needs)
        _checked_by[wrapper] = need
        if need.devices and not need.of_devices:
            # PyTorch's own attribute, which its collection-time tools read.
            wrapper._min_gpus_required = need.devices  # type: ignore[attr-defined]
        if need.world_size is not None:
            wrapper._required_world_size = need.world_size  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


def each_test(cls: F, decorate: Callable[[Any], Any]) -> F:
    """Decorate the tests of a class: a function in place of it would be no class, and its tests would not run."""
    names = unittest.defaultTestLoader.getTestCaseNames(cls)  # type: ignore[arg-type]  # any class
    for name in names:
        test = getattr(cls, name)
        setattr(cls, name, decorate(test))
    return cls


def declare_devices(target: Any, count: int) -> Any:
    """Let a runner lease `count` accelerators for a test, or for each test of a class, that skips without them."""
    need = Need(lambda: None, devices=count)
    all_needs = (need, *needs_of(target))
    setattr(target, ATTRIBUTE, all_needs)
    return target


def needs_of(func: Any) -> tuple[Need, ...]:
    """Return all needs of a test function, outermost decorator first."""
    return getattr(func, ATTRIBUTE, ())


def most_needed(tests: Iterable[Any]) -> int:
    """Return the largest number of accelerators that any of these tests needs."""
    counts = [0]
    for test in tests:
        counts += [need.devices for need in needs_of(test)]
    return max(counts)


def declared(needs: Iterable[Need], available: int) -> int:
    """Return how many accelerators the needs ask for on a machine that has `available`."""
    return max((need.devices_of(available) for need in needs), default=0)


def certain_needs(func: Any) -> Iterator[Need]:
    """Yield the needs that are sure to be checked when the test is called, outermost decorator first.

    A decorator of somebody else may call the test in another way, or not at all: needs below it are not sure.
    """
    layer = func
    while layer is not None:
        layer = getattr(layer, "__func__", layer)
        if not is_ours(layer):
            return
        if layer in _checked_by:
            yield _checked_by[layer]
        layer = getattr(layer, "__wrapped__", None)


def is_ours(function: Any) -> bool:
    """Is this function defined in this package?"""
    package, _, _ = __name__.partition(".")
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module == package or module.startswith(f"{package}.")


def first_unmet(func: Any) -> TestSkip | None:
    """Return the skip of the outermost need that is sure to be checked and that this machine does not meet."""
    for need in certain_needs(func):
        skip = need.unmet()
        if skip is not None:
            return skip
    return None


# -- needs of devices: memory, compute capability, peer access, NVLink
# A runner leases devices that have it. Without one, all devices that the process sees must have what the test needs.


def requires_memory(amount: str) -> Callable[[F], F]:
    """Decorator: skip on devices with less memory than `amount`, such as "20 GB" or "512 MiB"."""
    return _requires(DeviceNeeds(memory=read_bytes(amount)))


def requires_sm(major: int, minor: int = 0) -> Callable[[F], F]:
    """Decorator: skip on CUDA devices with a lower compute capability: `@requires_sm(9, 0)` needs Hopper."""
    for part in (major, minor):
        if isinstance(part, bool) or not isinstance(part, int) or part < 0:
            raise ValueError(f"requires_sm({major!r}, {minor!r}): write two numbers, such as requires_sm(9, 0)")
    return _requires(DeviceNeeds(capability=(major, minor)))


def requires_peer_access() -> Callable[[F], F]:
    """Decorator: skip unless there are several devices that can read each other's memory."""
    return _requires(DeviceNeeds(peer_access=True))


def requires_nvlink() -> Callable[[F], F]:
    """Decorator: skip unless NVLink connects several devices with each other."""
    return _requires(DeviceNeeds(nvlink=True))


def _requires(wanted: DeviceNeeds) -> Callable[[F], F]:
    """Skip unless all devices that the process sees meet these needs."""
    needed = 2 if wanted.of_several else 1

    def unmet() -> TestSkip | None:
        count = accelerators.device_count()
        if not count:
            return TEST_SKIPS["no_accelerator"]
        if count < needed:
            # This holds where ranks share a device, too: it has no connection.
            return too_few_devices(needed)
        why = device_rules.why_not(_facts(wanted), wanted, count)
        if why is None:
            return None
        return TestSkip(_GENERIC, f"needs {wanted}: {why}")

    return requires(Need(unmet, devices=needed, of_devices=wanted))


def _facts(wanted: DeviceNeeds) -> tuple[DeviceFacts, ...]:
    facts = accelerators.device_facts()
    if not wanted.nvlink:
        return facts
    # NVML's part is a tenth of the kit's import.
    from torch_testing_ext._machine import nvml

    return nvml.with_nvlinks(facts, accelerators.device_uuids())


# --------------------------------------------------------------------------------------------------------------------
# Decorators that declare the devices, ranks, backends and platforms that a distributed test needs.

ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]
DDP_RANK_DEVICES = ["cuda", "xpu"]


class DistTestCases:
    """Tables of the backends that lack a collective and of those that have a feature."""

    skip_collective: ClassVar[dict[str, set[str]]] = {
        "allgather_coalesced": {"nccl", "mpi", "ucc", "xccl"},
        "reduce": set(),
        "sendrecv anysource": {"nccl", "ucc", "xccl"},
        "cpu barrier": {"nccl", "ucc", "xccl"},
    }
    backend_feature: ClassVar[dict[str, set[str]]] = {
        "gpu": {"nccl", "gloo", "ucc", "xccl"},
        "cuda": {"nccl", "gloo", "ucc"},
        "ddp": {"nccl", "gloo", "ucc", "xccl"},
        "subgroup": {"nccl", "gloo", "ucc", "xccl"},
        "plugin": set(),
        "hpu": {"hccl"},
        "xpu": {"xccl"},
    }


def requires_ddp_rank(device: str) -> bool:
    return device in DDP_RANK_DEVICES


# -- devices


def at_least_x_gpu(x: int) -> bool:
    return accelerators.most_ranks() >= max(x, 1)


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[F], F]:
    """Decorator: skip with fewer than `x` accelerators. With `allow_cpu`, run on the CPU if there are none."""
    return requires(devices(x, allow_cpu))


def skip_if_no_gpu(func: F) -> F:
    """Skip with fewer accelerators than the ranks in WORLD_SIZE."""

    def unmet() -> TestSkip | None:
        available = accelerators.most_ranks()
        if available == 0:
            return TEST_SKIPS["no_accelerator"]
        wanted = _world_size_in_environ()
        return too_few_devices(wanted) if available < wanted else None

    return requires(Need(unmet, devices=1))(func)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Callable[[F], F]:
    """Skip with fewer than `x` accelerators, if the backend is NCCL, by whichever of its names."""
    if not uses_nccl(backend):
        return _unchanged
    return requires(devices(x))


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Callable[[F], F]:
    """`nccl_skip_if_lt_x_gpu` with its arguments swapped."""
    return nccl_skip_if_lt_x_gpu(backend, n)


def requires_world_size(n: int) -> Callable[[F], F]:
    """Require `n` ranks, each with an accelerator of its own; a harness reads it with `get_required_world_size`."""
    lacking = devices(n)

    def unmet() -> TestSkip | None:
        if lacking.unmet() is None:
            return None
        message = f"requires {n} accelerators, found {accelerators.most_ranks()}"
        return TestSkip(too_few_devices(n).exit_code, message)

    return requires(Need(unmet, devices=n, world_size=n))


def get_required_world_size(obj: Any, default: int) -> int:
    """Return the number of ranks that `requires_world_size` set on the current test of `obj`, else `default`."""
    current = getattr(obj, "_current_test_name", None)
    name = current() if callable(current) else getattr(obj, "_testMethodName", "")
    test = getattr(obj, name, None)
    return int(getattr(test, "_required_world_size", default))


def _unchanged(func: F) -> F:
    return func


# -- world size


def _world_size_in_environ() -> int:
    return int(os.environ["WORLD_SIZE"])


def _unless_mpi(skip: Callable[[int], bool], name: str) -> Need:
    def unmet() -> TestSkip | None:
        if os.environ.get("BACKEND") == "mpi" or not skip(_world_size_in_environ()):
            return None
        return TEST_SKIPS[name]

    return Need(unmet)


skip_if_small_worldsize = requires(_unless_mpi(lambda size: size < 8, "small_worldsize"))
skip_if_odd_worldsize = requires(_unless_mpi(lambda size: size % 2 == 1, "odd_worldsize"))


# -- backends. These decorate classes as well as functions, so they use unittest's own skip.


def _requires_backend(name: str) -> Callable[[Any], Any]:
    """Skip a test or a class where torch was built without a backend."""
    is_available = getattr(c10d, f"is_{name}_available")
    available = bool(is_available())
    skip = unittest.skipUnless(available, f"c10d was not compiled with the {name.upper()} backend")

    def unmet() -> TestSkip | None:
        return None if available else TEST_SKIPS["backend_unavailable"]

    def decorate(thing: Any) -> Any:
        need = Need(unmet, backend=name)
        all_needs = (need, *needs_of(thing))
        setattr(thing, ATTRIBUTE, all_needs)
        return skip(thing)

    return decorate


requires_gloo = functools.partial(_requires_backend, "gloo")
requires_nccl = functools.partial(_requires_backend, "nccl")
requires_ucc = functools.partial(_requires_backend, "ucc")
requires_mpi = functools.partial(_requires_backend, "mpi")
requires_xccl = functools.partial(_requires_backend, "xccl")


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Callable[[Any], Any]:
    """Skip where NCCL is older. Does nothing on a machine without CUDA: other decorators skip there."""
    if accelerators.accelerator_type() != "cuda":
        return _unchanged
    if not c10d.is_nccl_available():
        return requires_nccl()
    # Untyped in torch.
    nccl: Any = torch.cuda.nccl
    installed = nccl.version()
    return unittest.skipIf(installed < version, f"Requires NCCL {version} or newer, found {installed}: {msg}")


def requires_nccl_shrink() -> Callable[[Any], Any]:
    return requires_nccl_version((2, 27), "older ones cannot shrink groups")


def requires_accelerator_dist_backend(backends: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """Skip where torch has none of these backends (default: those for accelerators)."""
    wanted = list(ACCELERATOR_DIST_BACKENDS if backends is None else backends)
    available = any(_has_accelerator_backend(name) for name in wanted) or (backends is None and _has_own_backend())
    return unittest.skipUnless(available, f"No accelerator communication backend available among {wanted}")


def _has_own_backend() -> bool:
    """Has an extension a backend for its accelerators?"""
    kind = accelerators.accelerator_type()
    return kind not in (None, "cuda", "xpu", "hpu") and kind in c10d.Backend.default_device_backend_map


def _has_accelerator_backend(name: str) -> bool:
    if name in NCCL:
        return bool(c10d.is_backend_available(name))
    if name == "xccl":
        return bool(c10d.is_xccl_available())
    return name == "hccl" and accelerators.accelerator_type() == "hpu"


# -- platforms and imports


def skip_if_win32() -> Callable[[Any], Any]:
    return unittest.skipIf(sys.platform == "win32", "This test does not run on Windows")


def skip_if_rocm(func: F) -> F:
    skip = unittest.skipIf(torch.version.hip is not None, TEST_SKIPS["skipIfRocm"].message)
    return skip(func)


skip_if_rocm_multiprocess = skip_if_rocm


def import_transformers_or_skip() -> Callable[[F], F]:
    def unmet() -> TestSkip | None:
        return None if find_spec("transformers") else TEST_SKIPS["importerror"]

    return requires(Need(unmet))
