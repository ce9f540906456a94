"""The needs of a test, stored on its function, where the parent and a runner read them before any rank starts."""

import functools
import unittest
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_needs import NO_NEEDS, DeviceNeeds

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
    """Whether this function is defined in this package."""
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
