"""The base of the classes that run tests on one type of device."""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import torch

from torch_testing_ext._testing.marks import capabilities, parametrized
from torch_testing_ext._testing.marks.dtypes_of_tests import tol
from torch_testing_ext._testing.marks.parametrized import compose_parametrize_fns, dtype_name
from torch_testing_ext._torch.devices import accelerator_state

from .test_case import TestCase

# Keeps these frames out of unittest's tracebacks.
__unittest = True

PRIVATEUSE1 = "privateuse1"

Arguments = dict[str, Any]


class DeviceTypeTestBase(TestCase):
    """The base of the classes for one type of device: it gives tests their device, dtype and tolerances."""

    device_type: str = "generic_device_type"
    # Lets tests run that a decorator restricts to other types of device.
    bypass_device_restrictions: bool = False
    # Tests that this type of device leaves out, by class: their names, or "*" for all.
    test_exclusions: ClassVar[dict[str, Collection[str]] | None] = None
    # For PyTorch's decorator `ops`: the operators that this type of device has, and more decorators for some of them.
    op_allowlist: ClassVar[Collection[str] | None] = None
    op_overrides: ClassVar[dict[str, Iterable[Any]] | None] = None
    _stop_test_suite = False

    @classmethod
    def get_primary_device(cls) -> str:
        """The device that a test with the parameter `device` gets."""
        return cls.device_type

    @classmethod
    def get_all_devices(cls) -> list[str]:
        """The devices that a test with the parameter `devices` gets, the primary one first."""
        return [cls.get_primary_device()]

    @classmethod
    def distributed_backend(cls) -> str:
        return str(torch.distributed.get_default_backend_for_device(cls.device_type))

    @classmethod
    def set_test_configs(
        cls,
        *,
        op_allowlist: Collection[str] | None = None,
        op_overrides: dict[str, Iterable[Any]] | None = None,
        test_exclusions: dict[str, Collection[str]] | None = None,
    ) -> None:
        """Replace what is particular to this type of device: its operators, and the tests that it leaves out."""
        cls.op_allowlist, cls.op_overrides, cls.test_exclusions = op_allowlist, op_overrides, test_exclusions

    @classmethod
    def _get_test_exclusions(cls, test_class_name: str) -> Collection[str]:
        return (cls.test_exclusions or {}).get(test_class_name, ())

    @classmethod
    def without_exclusions(cls, test_class_name: str, tests: Iterable[str]) -> list[str] | None:
        """The tests of a generic class that this type of device has; None if it leaves out the class."""
        excluded = cls._get_test_exclusions(test_class_name)
        return None if "*" in excluded else [name for name in tests if name not in excluded]

    # PyTorch's `ops`, which a file may use beside our classes, calls these two before it makes its cases.

    @classmethod
    def _apply_op_allowlist(cls, ops: Any) -> None:
        if cls.op_allowlist is not None:
            ops.op_list = [op for op in ops.op_list if op.full_name in cls.op_allowlist]

    @classmethod
    def _apply_op_overrides(cls, ops: Any, test: Any = None) -> None:
        overrides = cls.op_overrides or {}
        for decorator in itertools.chain(*overrides.values()):
            decorator.device_type = type_name(cls.device_type)
        if overrides:
            ops.op_list = copy.deepcopy(ops.op_list)
            for op in ops.op_list:
                op.decorators += tuple(overrides.get(op.full_name, ()))

    @classmethod
    def _init_and_get_primary_device(cls) -> str:
        try:
            return cls.get_primary_device()
        except Exception:
            # The setUpClass of an extension may have to find the device first.
            cls.setUpClass()
            return cls.get_primary_device()

    @classmethod
    def _get_dtypes(cls, test: Any) -> Iterable[Any] | None:
        if not hasattr(test, "dtypes"):
            return None
        for_all = test.dtypes.get("all")
        if for_all is None:
            raise AssertionError(
                f"@dtypes is mandatory when using @dtypesIf however '{test.__name__}' didn't specify it"
            )
        chosen: Iterable[Any] = test.dtypes.get(cls.device_type, for_all)
        return chosen

    @classmethod
    def get_capabilities(cls) -> dict[str, bool]:
        """Return the capabilities of the device, for `requires_capabilities`."""
        return {name: bool(check()) for name, check in cls._capabilities().items()}

    @classmethod
    def _capabilities(cls) -> capabilities.Checks:
        """For subclasses to override: the check of each capability that the type of device declares."""
        return capabilities.BY_DEVICE_TYPE.get(cls.device_type, {})

    def _should_stop_test_suite(self) -> bool:
        """Whether an error has left the device unusable, so that no later test of this process can pass."""
        return False

    def run(self, result: Any = None) -> Any:
        ran = super().run(result)
        if self._stop_test_suite and result is not None:
            result.stop()
        return ran

    # -- making tests

    @classmethod
    def instantiate_test(cls, name: str, test: Any, *, generic_cls: type | None = None) -> None:
        """Add the tests that a generic test stands for: one for each combination of its parameters and dtypes."""
        for case, suffix, arguments, decorators in cls._cases_of(test, generic_cls):
            dtype = arguments.get("dtypes", arguments.get("dtype"))
            parts = (name, suffix, type_name(cls.device_type), _dtype_suffix(dtype))
            full_name = "_".join(filter(None, parts))
            cls._add_test(full_name, case, dict(arguments), decorators)

    @classmethod
    def _cases_of(cls, test: Any, generic_cls: type | None) -> Iterator[Any]:
        parametrize_fn = getattr(test, "parametrize_fn", _only_case)
        chosen = cls._get_dtypes(test)
        if chosen is not None:
            parametrize_fn = compose_parametrize_fns(functools.partial(_case_for_each_dtype, chosen), parametrize_fn)
        yield from parametrize_fn(test, generic_cls, cls)

    @classmethod
    def _add_test(
        cls, name: str, test: Any, arguments: Arguments, decorators: Callable[[Arguments], Iterable[Any]]
    ) -> None:
        """Add the method for one case: the generic test with the case's decorators and arguments."""
        parameters = inspect.signature(test).parameters
        if "device" in parameters or "devices" in parameters:
            device: Any = cls._init_and_get_primary_device()
            if hasattr(test, "num_required_devices"):
                device = cls.get_all_devices()
            _set_argument(arguments, "device", device)
        for decorator in decorators(arguments):
            test = decorator(parametrized.copy_of(test))

        @functools.wraps(test)
        def instantiated_test(self: DeviceTypeTestBase) -> Any:
            return self._run_instantiated(test, arguments)

        vars(instantiated_test).pop("parametrize_fn", None)
        instantiated_test.__name__ = name
        instantiated_test.__qualname__ = f"{cls.__qualname__}.{name}"
        if hasattr(cls, name):
            raise AssertionError(f"Redefinition of test {name}")
        setattr(cls, name, instantiated_test)

    def _run_instantiated(self, test: Any, arguments: Arguments) -> Any:
        before = self.precision, self.rel_tol
        try:
            self._apply_precision_override_for_test(test, arguments)
            return test(self, **arguments)
        except RuntimeError:
            self._stop_test_suite = self._should_stop_test_suite()
            raise
        finally:
            self.precision, self.rel_tol = before

    def _apply_precision_override_for_test(self, test: Any, arguments: Arguments) -> None:
        dtype = arguments.get("dtypes", arguments.get("dtype"))
        if not dtype:
            return
        self.precision = getattr(test, "precision_overrides", {}).get(dtype, self.precision)
        override = getattr(test, "tolerance_overrides", {}).get(dtype, tol(self.precision, self.rel_tol))
        self.precision, self.rel_tol = override


def _only_case(test: Any, generic_cls: type | None, device_cls: type | None) -> Iterator[Any]:
    yield test, "", {}, lambda _: ()


def _case_for_each_dtype(chosen: Iterable[Any], test: Any, generic_cls: Any, device_cls: Any) -> Iterator[Any]:
    for dtype in chosen:
        arguments: Arguments = {}
        _set_argument(arguments, "dtype", dtype)
        # The dtype's part of the name comes last, after the device's.
        yield test, "", arguments, lambda _: ()


def _set_argument(arguments: Arguments, name: str, value: Any) -> None:
    """Several devices or dtypes are passed under the plural of the name."""
    arguments.pop(name, None)
    arguments.pop(f"{name}s", None)
    arguments[f"{name}s" if isinstance(value, (list, tuple)) else name] = value


def _dtype_suffix(dtype: Any) -> str:
    if dtype is None:
        return ""
    several = dtype if isinstance(dtype, (list, tuple)) else (dtype,)
    return "_".join(map(dtype_name, several))


def type_name(device_type: str) -> str:
    return accelerator_state.extension_device_type() if device_type == PRIVATEUSE1 else device_type
