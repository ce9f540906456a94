"""The comparison of two leaves, which are no containers."""

import enum
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .equal_tensors import as_stored, compare_tensors, tensor_difference
from .equality_rules import ItemPath, Leaf, Rules, place

_NUMBERS = (int, float, complex)


def compare_all(leaves: list[Leaf], rules: Rules) -> Iterator[tuple[ItemPath, str]]:
    """Yield the places that differ, with the differences."""
    for path, actual, expected in leaves:
        try:
            difference = _compare(actual, expected, rules)
        except Exception as error:
            if not path:
                raise
            raise _same_error(error, f"{error}{place(path)}") from error
        if difference is not None:
            yield path, difference


def _same_error(error: Exception, text: str) -> Exception:
    """The same kind of error with a longer text, for the kinds that take one."""
    for kind in (TypeError, ValueError):
        if type(error) is kind:
            return kind(text)
    return RuntimeError(text)


def _compare(actual: Any, expected: Any, rules: Rules) -> str | None:
    """Compare two values that are no containers. The order of the questions is part of the answer."""
    pair = (actual, expected)
    if actual is None or expected is None:
        return None if actual is expected else f"None mismatch: {actual} is not {expected}"
    if _match(pair, _is_bool, _is_bool_like):
        return _compare_bools(actual, expected)
    if _match(pair, _is_number, _is_number_like):
        ours = _to_number(actual)
        theirs = _to_number(expected)
        if type(ours) in _NUMBERS and type(theirs) in _NUMBERS:
            return tensor_difference(ours, theirs, rules)
    if all(is_tensor_like(value) for value in pair):
        return compare_tensors(torch.as_tensor(actual), torch.as_tensor(expected), rules)
    if all(isinstance(value, torch.storage.TypedStorage) for value in pair):
        return compare_tensors(as_stored(actual), as_stored(expected), rules)
    return _compare_objects(actual, expected)


_Check = Callable[[Any], bool]


def _match(pair: tuple[Any, Any], wanted: _Check, accepted: _Check) -> bool:
    """Whether one of the two is `wanted`, and the other at least `accepted`."""
    first, second = pair
    if wanted(first) and accepted(second):
        return True
    return wanted(second) and accepted(first)


def _compare_bools(actual: Any, expected: Any) -> str | None:
    ours = _to_bool(actual)
    theirs = _to_bool(expected)
    return None if ours is theirs else f"Booleans mismatch: {ours} is not {theirs}"


def _is_of_numpy(value: Any, kind: str) -> bool:
    """Whether this is a value of a type of NumPy. Only where that is imported can there be one."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def _is_array(value: Any) -> bool:
    return _is_of_numpy(value, "ndarray")


def is_tensor_like(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_array(value)


def is_foreign_array(value: Any) -> bool:
    """Whether this is an array of a dtype that torch does not have."""
    if not _is_array(value):
        return False
    empty = sys.modules["numpy"].empty(0, dtype=value.dtype)
    try:
        torch.from_numpy(empty)
    except TypeError:
        return True
    return False


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or _is_of_numpy(value, "bool_")


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or _is_of_numpy(value, "number")


def _is_number_like(value: Any) -> bool:
    return _is_number(value) or is_tensor_like(value)


def _is_bool_like(value: Any) -> bool:
    return _is_bool(value) or _is_number_like(value)


def _single_element(value: Any, beside: str) -> Any:
    elements = value.numel() if isinstance(value, torch.Tensor) else value.size
    if elements > 1:
        raise ValueError(
            f"Only single element tensor-likes can be compared against a {beside}. Got {elements} elements instead."
        )
    return value.item()


def _to_bool(value: Any) -> bool:
    if is_tensor_like(value):
        return bool(_single_element(value, "boolean"))
    kind = type(value)
    if kind not in (bool, *_NUMBERS) and kind.__module__ != "numpy":
        raise TypeError(f"Unknown boolean type {kind}.")
    return bool(value)


def _to_number(value: Any) -> Any:
    if is_tensor_like(value):
        number = _single_element(value, "number")
        return int(number) if isinstance(number, bool) else number
    if isinstance(value, enum.Enum):
        return int(value)  # type: ignore[call-overload]
    if _is_of_numpy(value, "number"):
        return value.item()
    return value


_unittest = unittest.TestCase()
_unittest.maxDiff = None


def _compare_objects(actual: Any, expected: Any) -> str | None:
    """Compare by `==`; unittest's message for strings and sets shows where they differ."""
    try:
        _unittest.assertEqual(actual, expected)
    except AssertionError as error:
        return f"{_kind_of(actual, expected)} comparison failed: {error}"
    except Exception as error:
        kinds = f"{type(actual).__name__} == {type(expected).__name__}"
        raise RuntimeError(f"{kinds} raised {type(error).__name__}: {error}") from error
    return None


def _kind_of(actual: Any, expected: Any) -> str:
    kinds = {"String": (str, bytes), "Set": (set,), "Type": (type,)}
    for name, classes in kinds.items():
        if isinstance(actual, classes) and isinstance(expected, classes):
            return name
    return "Object"
