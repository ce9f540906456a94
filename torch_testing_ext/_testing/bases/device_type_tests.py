"""Tests that run once for each type of device: `instantiate_device_type_tests` makes a class of tests for each."""

import copy
import inspect
from collections.abc import Collection, Iterable
from typing import Any

from .device_type_base import DeviceTypeTestBase
from .types_of_device import get_desired_device_type_test_bases

# Keeps these frames out of unittest's tracebacks.
__unittest = True


def instantiate_device_type_tests(
    generic_test_class: type,
    scope: dict[str, Any],
    except_for: str | Collection[str] | None = None,
    only_for: str | Collection[str] | None = None,
    include_lazy: bool = False,
    allow_mps: bool = False,
    allow_xpu: bool = False,
) -> None:
    """Replace a generic class in `scope`, a module's globals(), by one class for each type of device.

    `class Test: def test_x(self, device)` becomes `TestCPU.test_x_cpu`, `TestCUDA.test_x_cuda`, and so on.
    """
    del scope[generic_test_class.__name__]
    members = dict(vars(generic_test_class))
    tests = [name for name in members if name.startswith("test")]
    for base in get_desired_device_type_test_bases(except_for, only_for, include_lazy, allow_mps, allow_xpu):
        chosen = base.without_exclusions(generic_test_class.__name__, tests)
        if chosen is not None:
            cls = _class_for(base, generic_test_class, chosen)
            scope[cls.__name__] = cls
    # The generic tests lack a device: they must not be found in subclasses of the generic class.
    for name in tests:
        delattr(generic_test_class, name)


def _class_for(base: type[DeviceTypeTestBase], generic: Any, tests: Iterable[str]) -> type[DeviceTypeTestBase]:
    """Make the class that runs these tests of a generic class on one type of device."""
    cls: Any = type(generic.__name__ + base.device_type.upper(), (base, generic), {})
    cls.__module__ = generic.__module__

    def set_up_class(cls: Any) -> None:
        base.setUpClass.__func__(cls)  # type: ignore[attr-defined]
        generic.setUpClass.__func__(cls)

    def tear_down_class(cls: Any) -> None:
        generic.tearDownClass.__func__(cls)
        base.tearDownClass.__func__(cls)  # type: ignore[attr-defined]

    cls.setUpClass = classmethod(set_up_class)
    cls.tearDownClass = classmethod(tear_down_class)
    for name, member in vars(generic).items():
        # An attribute of the generic class overrides the base's, as if the class was derived from it alone.
        if not name.startswith(("test", "__")) and name not in vars(cls):
            setattr(cls, name, member)
    for name in tests:
        test = getattr(generic, name)
        if "generic_cls" in inspect.signature(cls.instantiate_test).parameters:
            cls.instantiate_test(name, copy.deepcopy(test), generic_cls=generic)
        else:
            # An extension's own, from before the parameter existed.
            cls.instantiate_test(name, copy.deepcopy(test))
    made: type[DeviceTypeTestBase] = cls
    return made
