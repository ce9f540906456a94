"""Settings of single tests: decorators for the timeout and the checks of collectives; the rules of their devices."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import kinds_of
from torch_testing_ext._process import notes
from torch_testing_ext._process.project_settings import AUTO
from torch_testing_ext.faults import PLAN, FaultPlan, Sweep, SweepReport
from torch_testing_ext.launch.environment import read_settings

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
    """Has one of these functions and classes `@collectives_may_differ`?"""
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


def plan_on(target: Any) -> FaultPlan | Sweep | None:
    """Return what `@faults` or `@fault_sweep` has given to this function or method; None without one."""
    plan: FaultPlan | Sweep | None = getattr(target, PLAN, None)
    return plan


def faults_of_test(test: Any, restarts: bool = True) -> FaultPlan | Sweep | None:
    """Return what `@faults` or `@fault_sweep` gives to this test case. Raises its error if its ranks cannot have it.

    `restarts`: a rank can be started again.
    """
    plan = plan_on(_method(test))
    if plan is None:
        # The number of ranks may be that of the devices, which takes long to find.
        if read_settings().drill is None:
            return None
        own = test._overrides("_check_return_codes")
        why = "its class judges exit codes itself, by _check_return_codes" if own else ""
        return drill_of(test.id(), int(test.world_size), why)
    say_not_drilled(OWN_FAULTS)
    why = plan.why_not(int(test.world_size))
    if isinstance(plan, FaultPlan) and plan.restarts and not restarts:
        why = why or f"restart({plan.restarts[0]}) needs ranks of its own for each test: use MultiProcessTestCase"
    if why:
        raise test._error(f"@faults of {type(test).__qualname__}.{test._testMethodName}: {why}")
    return plan


# Why a test is in no drill.
OWN_FAULTS = "it has faults of its own"


def drill_of(test: str, world_size: int, why_not: str = "") -> Sweep | None:
    """Return the faults that the runner wants to try in the test with this name; None if it has none in mind.

    `why_not`: the reason for which this test cannot have them.
    """
    drill = read_settings().drill
    if drill is None:
        return None
    why_not = why_not or ("it has one rank, and nobody survives that" if world_size == 1 else "")
    if why_not:
        say_not_drilled(why_not)
        return None
    return drill.sweep(test)


def say_not_drilled(why: str) -> None:
    """Tell the runner why a test is in no drill, if there is one."""
    if read_settings().drill is not None:
        notes.note_sweep(SweepReport(why_not=why))


def check_faults(cls: type) -> None:
    """Raise ValueError if a test of this class has faults for a rank that it has not, as far as that is known."""
    plans = {name: plan for name, test in vars(cls).items() if (plan := plan_on(test)) is not None}
    if not plans:
        # The number of ranks may be that of the devices, which takes long to find.
        return
    size = getattr(cls, "world_size", None)
    if isinstance(size, property):
        # It may need more than an instance has that nobody has made.
        with suppress(Exception):
            size = size.__get__(object.__new__(cls))
    if not isinstance(size, int) or size < 1:
        return
    for name, plan in plans.items():
        why = plan.why_not(size)
        if why:
            raise ValueError(f"@faults of {cls.__qualname__}.{name}: {why}")


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
