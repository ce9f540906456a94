"""`parametrize` and related decorators: one test for each set of values, named as PyTorch names them.

A decorator only stores a function on the method, as `parametrize_fn`; `instantiate_parametrized_tests` replaces the
method by one for each set of values. The function is called as `(test, generic_cls, device_cls)` and yields cases:
`(test, name suffix, arguments, function from all arguments to the decorators to apply)`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from torch_testing_ext._testing.helpers.function_runs import wrapSwapTensorsTest

# Keeps these frames out of unittest's tracebacks.
__unittest = True

Decorator = Callable[[Any], Any]
Arguments = dict[str, Any]
# The decorators of a case, by all of its arguments.
DecoratorsFor = Callable[[Arguments], Iterable[Decorator]]
Case = tuple[Callable[..., Any], str, Arguments, DecoratorsFor]
ParametrizeFn = Callable[..., Iterator[Case]]
Class = TypeVar("Class", bound=type)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    _, name = str(dtype).split(".")
    return name


class _TestParametrizer:
    """The base of all parametrizing decorators: `_parametrize_test` of a subclass yields the cases of a test."""

    def _parametrize_test(self, test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        raise NotImplementedError

    def __call__(self, fn: Any) -> Any:
        earlier = getattr(fn, "parametrize_fn", None)
        added = self._parametrize_test
        fn.parametrize_fn = compose_parametrize_fns(earlier, added) if earlier else added
        return fn


def compose_parametrize_fns(old_parametrize_fn: ParametrizeFn, new_parametrize_fn: ParametrizeFn) -> ParametrizeFn:
    """Combine every case of one with every case of the other; names follow the decorators from the top down."""

    def composed(test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        inner_cases = list(old_parametrize_fn(test, generic_cls, device_cls))
        for inner_test, inner_name, inner_args, inner_decorators in inner_cases:
            outer_cases = new_parametrize_fn(inner_test, generic_cls, device_cls)
            for outer_test, outer_name, outer_args, outer_decorators in outer_cases:
                _check_disjoint(test, inner_args, outer_args)
                name = "_".join(filter(None, (outer_name, inner_name)))
                arguments = {**inner_args, **outer_args}
                yield outer_test, name, arguments, _both(inner_decorators, outer_decorators)

    return composed


def _check_disjoint(test: Any, inner: Arguments, outer: Arguments) -> None:
    twice = sorted(inner.keys() & outer.keys())
    if twice:
        raise RuntimeError(
            f"{test.__name__}: more than one decorator parametrizes over the same parameter: {', '.join(twice)}"
        )


def _both(first: DecoratorsFor, second: DecoratorsFor) -> DecoratorsFor:
    return lambda arguments: [*first(arguments), *second(arguments)]


class subtest:
    """The value, or tuple of values, of one case, with an optional name and decorators of its own."""

    __slots__ = ["arg_values", "decorators", "name"]

    def __init__(
        self,
        arg_values: Any,
        name: str | None = None,
        decorators: Iterable[Decorator] | None = None,
    ) -> None:
        self.arg_values = arg_values
        self.name = name
        self.decorators = list(decorators or ())


class parametrize(_TestParametrizer):
    """Runs a test once for each of `arg_values`, passed under the comma-separated names in `arg_str`.

    Cases are named after parameter and value (`test_x_size_3`), by `name_fn(*values)`, or by the name of a `subtest`.
    """

    def __init__(
        self,
        arg_str: str,
        arg_values: Iterable[Any],
        name_fn: Callable[..., str] | None = None,
    ) -> None:
        self.arg_names = [name.strip() for name in arg_str.split(",") if name != ""]
        self.arg_values = arg_values
        self.name_fn = name_fn

    def _parametrize_test(self, test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        """Yield a case for each of the values."""
        if not self.arg_names:
            yield test, "", {}, _always(())
            return
        is_empty = True
        for index, given in enumerate(self.arg_values):
            is_empty = False
            case = given if isinstance(given, subtest) else subtest(given)
            values = self._values(case.arg_values, test)
            name = case.name or self._name(index, values)
            arguments = dict(zip(self.arg_names, values, strict=True))
            yield test, name, arguments, _always(case.decorators)
        if is_empty:
            raise ValueError(
                f"{test.__qualname__}: an empty arg_values was passed to @parametrize. "
                "A generator is empty when it is used a second time: pass a list."
            )

    def _values(self, given: Any, test: Any) -> list[Any]:
        expected = len(self.arg_names)
        values = list(given) if expected > 1 else [given]
        if len(values) != expected:
            names = ", ".join(self.arg_names)
            raise RuntimeError(
                f"{test.__name__}: {len(values)} values ({values}) for the {expected} parameters {names}"
            )
        return values

    def _name(self, index: int, values: list[Any]) -> str:
        if self.name_fn is not None:
            return self.name_fn(*values)
        named = zip(self.arg_names, values, strict=True)
        return "_".join(_spell(index, name, value) for name, value in named)


def _spell(index: int, name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return str(value)
    # PyTorch's descriptions of operators have a name for tests.
    if type(value).__name__ in ("OpInfo", "ModuleInfo"):
        return str(value.formatted_name)
    if isinstance(value, (int, float, str)):
        text = str(value).replace(".", "_")
        return f"{name}_{text}"
    return f"{name}{index}"


def _always(decorators: Iterable[Decorator]) -> DecoratorsFor:
    return lambda _: decorators


class reparametrize(_TestParametrizer):
    """Changes the cases of another parametrizer: `adapter_fn(name, arguments)` yields `(name, arguments)` pairs.

    A case for which it returns or yields None is left out.
    """

    def __init__(self, parametrizer: _TestParametrizer, adapter_fn: Callable[[str, Arguments], Any]) -> None:
        self.parametrizer = parametrizer
        self.adapter_fn = adapter_fn

    def _parametrize_test(self, test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        cases = self.parametrizer._parametrize_test(test, generic_cls, device_cls)
        for gen_test, name, arguments, decorators in cases:
            adapted_cases = self.adapter_fn(name, arguments) or ()
            for adapted in adapted_cases:
                if adapted is not None:
                    new_name, new_arguments = adapted
                    yield gen_test, new_name, new_arguments, decorators


class decorateIf(_TestParametrizer):
    """Applies `decorator` to the cases whose arguments satisfy `predicate_fn(arguments)`."""

    def __init__(self, decorator: Decorator, predicate_fn: Callable[[Arguments], bool]) -> None:
        self.decorator = decorator
        self.predicate_fn = predicate_fn

    def _parametrize_test(self, test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        def decorators_for(arguments: Arguments) -> list[Decorator]:
            return [self.decorator] if self.predicate_fn(arguments) else []

        yield test, "", {}, decorators_for


def instantiate_parametrized_tests(generic_cls: Class) -> Class:
    """Replace the generic tests of a class by parametrized ones; a function to call, or a class decorator."""
    for attribute in dir(generic_cls):
        generic = getattr(generic_cls, attribute)
        if not hasattr(generic, "parametrize_fn"):
            continue
        _hide(generic_cls, attribute)
        cases = generic.parametrize_fn(generic, generic_cls=generic_cls, device_cls=None)
        for test, suffix, arguments, decorators_for in cases:
            name = f"{test.__name__}_{suffix}"
            method = _specialise(test, name, arguments, decorators_for(arguments))
            _add(generic_cls, name, method)
    return generic_cls


def _hide(cls: type, attribute: str) -> None:
    """Remove a generic test from the class; an inherited one stays in its own class and is overridden by None."""
    if attribute in vars(cls):
        delattr(cls, attribute)
    if hasattr(cls, attribute):
        setattr(cls, attribute, None)


def _add(cls: type, name: str, test: Any) -> None:
    if "." in name:
        raise RuntimeError(f"{cls.__name__}: the name of a test cannot contain a period: {name!r}")
    if getattr(cls, name, None) is not None:
        raise AssertionError(f"{cls.__name__}: two tests have the name {name}; rename one by subtest(..., name=...)")
    setattr(cls, name, test)


def _specialise(test: Any, name: str, arguments: Arguments, decorators: Iterable[Decorator]) -> Any:
    """Make the method for one case: the generic one with the case's decorators and arguments."""
    for decorator in decorators:
        # A copy, as some decorators set attributes of the function.
        test = decorator(copy_of(test))

    @functools.wraps(test)
    def instantiated_test(self: Any) -> Any:
        return test(self, **arguments)

    vars(instantiated_test).pop("parametrize_fn", None)
    place, _, _ = test.__qualname__.rpartition(".")
    instantiated_test.__name__ = name
    instantiated_test.__qualname__ = f"{place}.{name}" if place else name
    return instantiated_test


def copy_of(test: Any) -> Any:
    @functools.wraps(test)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return decorated


class swap(_TestParametrizer):
    """Runs a test once for each of these settings of whether converting a module swaps its parameters."""

    def __init__(self, swap_values: Iterable[bool]) -> None:
        self.swap_values = swap_values

    def _parametrize_test(self, test: Any, generic_cls: type, device_cls: type | None) -> Iterator[Case]:
        for value in self.swap_values:
            decorate = wrapSwapTensorsTest(value)
            yield decorate(test), f"swap_{value}", {}, _always(())
