"""Tests that run once for each type of device: `instantiate_device_type_tests` makes a class of tests for each.

Importing this module touches no accelerator, and neither does a class for one: it asks its device when it is set up.
"""

import copy
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._testing.marks import capabilities, parametrized
from torch_testing_ext._testing.marks.dtypes_of_tests import tol
from torch_testing_ext._testing.marks.parametrized import compose_parametrize_fns, dtype_name
from torch_testing_ext._torch.devices import accelerator_state

from .test_case import TestCase

# Keeps these frames out of unittest's tracebacks.
__unittest = True

PYTORCH_TESTING_DEVICE_ONLY_FOR_KEY = "PYTORCH_TESTING_DEVICE_ONLY_FOR"
PYTORCH_TESTING_DEVICE_EXCEPT_FOR_KEY = "PYTORCH_TESTING_DEVICE_EXCEPT_FOR"
PYTORCH_TESTING_DEVICE_FOR_CUSTOM_KEY = "PYTORCH_TESTING_DEVICE_FOR_CUSTOM"
_PRIVATEUSE1 = "privateuse1"
_cuda: Any = torch.cuda
_xpu: Any = torch.xpu

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

    # PyTorch's `ops`, which a file may use beside our classes, calls these two before it makes its cases.

    @classmethod
    def _apply_op_allowlist(cls, ops: Any) -> None:
        if cls.op_allowlist is not None:
            ops.op_list = [op for op in ops.op_list if op.full_name in cls.op_allowlist]

    @classmethod
    def _apply_op_overrides(cls, ops: Any, test: Any = None) -> None:
        overrides = cls.op_overrides or {}
        for decorator in itertools.chain(*overrides.values()):
            decorator.device_type = _type_name(cls.device_type)
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
            parts = (name, suffix, _type_name(cls.device_type), _dtype_suffix(dtype))
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


def _type_name(device_type: str) -> str:
    return accelerator_state.extension_device_type() if device_type == _PRIVATEUSE1 else device_type


# -- the types of device


class CPUTestBase(DeviceTypeTestBase):
    """The base of tests on CPU."""

    device_type = "cpu"


class _IndexedTestBase(DeviceTypeTestBase):
    """The base of tests on devices that have an index."""

    # setUpClass asks for the current device; before that, without touching the device, the first one is assumed.
    primary_device: ClassVar[str] = ""

    @classmethod
    def get_primary_device(cls) -> str:
        return cls.primary_device or f"{_type_name(cls.device_type)}:0"

    @classmethod
    def get_all_devices(cls) -> list[str]:
        primary = cls.get_primary_device()
        kind, _, _ = primary.partition(":")
        devices = [f"{kind}:{index}" for index in range(cls._device_count())]
        others = [device for device in devices if device != primary]
        return [primary, *others]

    @classmethod
    def _device_count(cls) -> int:
        return accelerators.device_count() if accelerators.accelerator_type() == cls.device_type else 1


class CUDATestBase(_IndexedTestBase):
    """The base of tests on CUDA devices."""

    device_type = "cuda"
    no_magma: ClassVar[bool] = True
    no_cudnn: ClassVar[bool] = True
    cudnn_version: ClassVar[int | None] = None

    def has_cudnn(self) -> bool:
        return not self.no_cudnn

    @classmethod
    def setUpClass(cls) -> None:
        # Another process answers: if this one initialised CUDA, a class of ranks could no longer fork them.
        properties = accelerators.cuda_properties()
        cls.no_magma = not properties.get("has_magma")
        cls.no_cudnn = not properties.get("accepts_cudnn")
        cls.cudnn_version = None if cls.no_cudnn else properties.get("cudnn_version")
        cls.primary_device = f"cuda:{torch.cuda.current_device() if _cuda.is_initialized() else 0}"

    def _should_stop_test_suite(self) -> bool:
        try:
            if _cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


class XPUTestBase(_IndexedTestBase):
    """The base of tests on XPU devices."""

    device_type = "xpu"

    @classmethod
    def setUpClass(cls) -> None:
        cls.primary_device = f"xpu:{torch.xpu.current_device() if _xpu.is_initialized() else 0}"


class HPUTestBase(_IndexedTestBase):
    """The base of tests on HPU devices."""

    device_type = "hpu"


class MPSTestBase(_IndexedTestBase):
    """The base of tests on MPS."""

    device_type = "mps"


class PrivateUse1TestBase(_IndexedTestBase):
    """The base of tests on the device of an extension."""

    device_type = _PRIVATEUSE1

    @classmethod
    def setUpClass(cls) -> None:
        # A test's class, not this base, becomes one of the extension's type: PyTorch changes the base.
        name = accelerator_state.extension_device_type()
        cls.device_type = name
        module = getattr(torch, name)
        may_ask = getattr(module, "is_initialized", lambda: True)()
        cls.primary_device = f"{name}:{module.current_device() if may_ask else 0}"

    @classmethod
    def _device_count(cls) -> int:
        return int(getattr(torch, accelerator_state.extension_device_type()).device_count())


def get_device_type_test_bases() -> list[type[DeviceTypeTestBase]]:
    """The bases of the types of device that this machine has; XPU, MPS and HPU only where tests ask for them."""
    bases: list[type[DeviceTypeTestBase]] = [CPUTestBase]
    if flag("TEST_CUDA"):
        bases.append(CUDATestBase)
    if is_privateuse1_backend_available():
        bases.append(PrivateUse1TestBase)
    return bases


def is_privateuse1_backend_available() -> bool:
    module = getattr(torch, accelerator_state.extension_device_type(), None)
    return bool(module is not None and module.is_available())


def remove_device_and_dtype_suffixes(test_name: str) -> str:
    """Return the name that a test had before it was made for a type of device and a dtype."""
    rest, _, dtype = test_name.rpartition("_")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        return test_name
    name, _, device = rest.rpartition("_")
    devices = {base.device_type for base in get_device_type_test_bases()}
    return name if device in devices else rest


def filter_desired_device_types(
    device_type_test_bases: Iterable[type[DeviceTypeTestBase]],
    except_for: str | Collection[str] | None = None,
    only_for: str | Collection[str] | None = None,
) -> list[type[DeviceTypeTestBase]]:
    """The bases whose type of device is in `only_for`, if that is given, and not in `except_for`."""
    without = _types(except_for)
    only = _types(only_for)
    both = without & only
    if both:
        raise AssertionError(f"device ({both}) appeared in both except_for and only_for")
    chosen = []
    for base in device_type_test_bases:
        kind = _generic_name(base.device_type)
        if kind not in without and (not only or kind in only):
            chosen.append(base)
    return chosen


def _types(given: str | Collection[str] | None) -> set[str]:
    device_types = [given] if isinstance(given, str) else given or ()
    return {_generic_name(device_type) for device_type in device_types}


def _generic_name(device_type: str) -> str:
    """The device of an extension is always called privateuse1 here."""
    return _PRIVATEUSE1 if device_type == accelerator_state.extension_device_type() else device_type


def get_desired_device_type_test_bases(
    except_for: str | Collection[str] | None = None,
    only_for: str | Collection[str] | None = None,
    include_lazy: bool = False,
    allow_mps: bool = False,
    allow_xpu: bool = False,
) -> list[type[DeviceTypeTestBase]]:
    """The bases that a call of `instantiate_device_type_tests` with these arguments uses, after the environment."""
    if include_lazy:
        raise NotImplementedError("lazy tensors are not supported here: use PyTorch's own common_device_type")
    bases = get_device_type_test_bases()
    for wanted, name, base in (
        (allow_mps, "TEST_MPS", MPSTestBase),
        (allow_xpu, "TEST_XPU", XPUTestBase),
        (True, "TEST_HPU", HPUTestBase),
    ):
        if wanted and flag(name):
            bases.append(base)
    chosen = filter_desired_device_types(bases, except_for, only_for)
    custom = _in_environment(PYTORCH_TESTING_DEVICE_FOR_CUSTOM_KEY)
    chosen += [base for base in bases if base.device_type in custom and base not in chosen]
    return filter_desired_device_types(
        chosen,
        _in_environment(PYTORCH_TESTING_DEVICE_EXCEPT_FOR_KEY),
        _in_environment(PYTORCH_TESTING_DEVICE_ONLY_FOR_KEY),
    )


def _in_environment(key: str) -> list[str]:
    device_types = os.environ.get(key, "").split(",")
    return [device_type for device_type in device_types if device_type]


def get_all_device_types() -> list[str]:
    return ["cpu", "cuda"] if flag("TEST_CUDA") else ["cpu"]


# -- making the classes


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
        excluded = base._get_test_exclusions(generic_test_class.__name__)
        if "*" not in excluded:
            chosen = [name for name in tests if name not in excluded]
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
