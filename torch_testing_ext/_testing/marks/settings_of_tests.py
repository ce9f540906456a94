"""Settings of single tests: decorators for the timeout and the checks of collectives; the rules of their devices."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import kinds_of
from torch_testing_ext._process.devices_setting import AUTO

# Keeps these frames out of tracebacks: a wrong value is shown at the line of the user.
__unittest = True
__tracebackhide__ = True

T = TypeVar("T")
TIMEOUT = "_torch_testing_ext_timeout"
_MAY_DIFFER = "_torch_testing_ext_collectives_may_differ"
# A test that runs in a whole world by itself.
WHOLE_WORLD = "_torch_testing_ext_whole_world"
_SANITIZE = "_torch_testing_ext_sanitize"


def _set(attribute: str, value: object) -> Callable[[T], T]:
    def decorate(target: T) -> T:
        setattr(target, attribute, value)
        return target

    return decorate


def timeout(seconds: float) -> Callable[[T], T]:
    """Decorator: limit the time of a test, or of each test in a class. A test's own timeout overrides its class's.

    @timeout(60)
    def test_slow(self): ...
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise ValueError(f"@timeout({seconds!r}): the timeout must be a number of seconds greater than 0")
    return _set(TIMEOUT, float(seconds))


def timeout_of(test: Any) -> float | None:
    """Return the seconds that `@timeout` gives to this test case; None without it."""
    of_class = getattr(test, TIMEOUT, None)
    return getattr(_method(test), TIMEOUT, of_class)


def collectives_may_differ(reason: str) -> Callable[[T], T]:
    """Decorator: let ranks call different collectives in a test, or in the tests of a class.

    @collectives_may_differ("tests the error")
    def test_mismatch(self): ...
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(
            f"@collectives_may_differ({reason!r}): say why, as in @collectives_may_differ('tests the error')"
        )
    return _set(_MAY_DIFFER, reason)


def may_differ(*targets: Any) -> bool:
    """Whether one of these functions and classes has `@collectives_may_differ`."""
    return any(hasattr(target, _MAY_DIFFER) for target in targets)


def sanitize(*kinds: str) -> Callable[[T], T]:
    """Decorator: check a test, or the tests of a class, as `--sanitize=KINDS` does.

        @sanitize("nan", "races")
        def test_step(self): ...

    `@sanitize()` checks the default kinds. The kinds of a test are added to those of its class and of the run.
    """
    if any(not isinstance(kind, str) for kind in kinds):
        raise ValueError("@sanitize takes the names of kinds, and has to be called: @sanitize() or @sanitize('nan')")
    names = kinds or ("default",)
    try:
        kinds_of(names)
    except ValueError as error:
        raise ValueError(f"@sanitize{kinds}: {error}") from None
    return _set(_SANITIZE, names)


def kinds_on(*targets: Any) -> tuple[str, ...]:
    """The kinds that `@sanitize` names on these functions and classes."""
    kinds: list[str] = []
    for target in targets:
        kinds += getattr(target, _SANITIZE, ())
    return tuple(kinds)


def kinds_of_test(test: Any) -> tuple[str, ...]:
    """The kinds that `@sanitize` names on this test case and on its class."""
    return kinds_on(_method(test), type(test))


def _method(test: Any) -> Any:
    return getattr(test, test._testMethodName, None)


def checked_devices(devices: Any) -> int | str | None:
    """Return what a test says of its devices: a number, `AUTO`, or None for nothing. Raises ValueError."""
    is_number = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 0
    if devices is not None and devices != AUTO and not is_number:
        raise ValueError(f"devices is {devices!r}; it must be 'auto', or a number of accelerators, 0 or more")
    return devices  # type: ignore[no-any-return]  # checked here


def devices_for(
    devices: int | str | None, world_size: int, backend: str | None, default: str | None
) -> int | str | None:
    """Complete what a test says of its devices, if it says nothing: by its backend, or else by this default.

    A backend of accelerators needs one for each rank, and has no use for the CPU; with any other one, nothing is said.
    """
    if devices in (None, AUTO) and backend is not None and _needs_accelerators(backend):
        return world_size
    return default if devices is None and backend is None else devices


def _needs_accelerators(backend: str) -> bool:
    # It imports torch, which marks without a backend do not need.
    from torch_testing_ext._machine import accelerators

    return accelerators.need_accelerators(backend)
