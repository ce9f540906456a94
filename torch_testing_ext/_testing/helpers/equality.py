"""The comparison behind `TestCase.assertEqual`.

Containers are walked first, so that a wrong length or key is reported before any value; then every pair of leaves is
compared. The result is a text that names the item that differs, or None. A comparison that makes no sense (three
elements against one number, a DTensor against a plain tensor) is an error, not a difference.

The rules of equality, and the phrases by which a test may recognise a failure, are PyTorch's.
"""

import dataclasses
import enum
import re
import reprlib
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_testing_ext._torch.signs import error_texts
from torch_testing_ext._torch.tensors import tensor_comparison

ItemPath = tuple[Any, ...]
# The two values at a place.
Leaf = tuple[ItemPath, Any, Any]

_NUMBERS = (int, float, complex)
_STORED_AS = {
    torch.quint8: torch.uint8,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
}
_LISTED_ITEMS = 10
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


@dataclasses.dataclass(frozen=True)
class Rules:
    """The strictness of a comparison. A floor raises a tolerance, given or default."""

    rtol: float | None = None
    atol: float | None = None
    rtol_floor: float = 0.0
    atol_floor: float = 0.0
    equal_nan: bool = True
    exact_dtype: bool = True
    exact_device: bool = False
    exact_layout: bool = False
    exact_stride: bool = False
    exact_is_coalesced: bool = False


class _Different(Exception):
    """Raised for two containers of different structure."""

    def __init__(self, path: ItemPath, text: str) -> None:
        super().__init__(text)
        self.path = path
        self.text = text


def find_difference(actual: Any, expected: Any, rules: Rules) -> str | None:
    """Describe the first difference; None where the values are equal."""
    actual, expected = _as_tensor_beside(actual, expected), _as_tensor_beside(expected, actual)
    if _are_dtensors(actual, expected):
        layout = _layout_difference(actual, expected)
        if layout is not None:
            return layout
        actual, expected = actual.to_local(), expected.to_local()
    try:
        leaves = list(_walk(actual, expected, ()))
    except _Different as different:
        return different.text + _place(different.path)
    differences = list(_compare_all(leaves, rules))
    if not differences:
        return None
    (path, text), *others = differences
    paths_of_others = [path for path, _ in others]
    return text + _place(path) + _others(paths_of_others, len(leaves))


def _place(path: ItemPath) -> str:
    if not path:
        return ""
    return f"\n\nThe failure occurred for item {_spell(path)}"


def _others(paths: list[ItemPath], total: int) -> str:
    if not paths:
        return ""
    listed = ", ".join(_spell(path) for path in paths[:_LISTED_ITEMS])
    more = ", ..." if len(paths) > _LISTED_ITEMS else ""
    return f"\n{len(paths) + 1} of {total} items differ; the others are {listed}{more}"


def _spell(path: ItemPath) -> str:
    return "".join(f"[{item!r}]" for item in path)


# -- containers


def _as_tensor_beside(value: Any, other: Any) -> Any:
    """Convert a sequence that is compared with a tensor to a tensor like it; only at the top, not inside containers."""
    if isinstance(other, torch.Tensor) and isinstance(value, Sequence):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device)
    return value


def _walk(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    """Yield the pairs of leaves below a place. Raises _Different where the structure differs."""
    actual, expected = _unpack(actual, expected)
    if isinstance(actual, bytes) and isinstance(expected, bytes):
        yield path, actual, expected
    elif _is_sequence(actual) and _is_sequence(expected):
        yield from _walk_sequences(actual, expected, path)
    elif _is_mapping(actual) and _is_mapping(expected):
        yield from _walk_mappings(actual, expected, path)
    elif _are_dataclasses_to_walk(actual, expected):
        yield from _walk_dataclasses(actual, expected, path)
    else:
        yield path, actual, expected


def _walk_dataclasses(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    for field in dataclasses.fields(actual):
        if field.compare:
            ours = getattr(actual, field.name)
            theirs = getattr(expected, field.name)
            yield from _walk(ours, theirs, (*path, field.name))


def _walk_sequences(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    if len(actual) != len(expected):
        raise _Different(path, _length_difference(actual, expected))
    for index in range(len(actual)):
        yield from _walk(actual[index], expected[index], (*path, index))


def _length_difference(actual: Any, expected: Any) -> str:
    if len(actual) > len(expected):
        which, longer, start = "first", actual, len(expected)
    else:
        which, longer, start = "second", expected, len(actual)
    end = min(len(longer), start + _LISTED_ITEMS)
    rest = [longer[index] for index in range(start, end)]
    return (
        f"The length of the sequences mismatch: {len(actual)} != {len(expected)}\n"
        f"The {which} goes on with {_SHORT.repr(rest)}"
    )


def _walk_mappings(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    missing = [key for key in expected if key not in actual]
    added = [key for key in actual if key not in expected]
    if missing or added:
        raise _Different(
            path,
            "The keys of the mappings do not match:\n"
            f"Missing keys in the actual mapping: {_sorted_if_possible(missing)}\n"
            f"Additional keys in the actual mapping: {_sorted_if_possible(added)}",
        )
    for key in _sorted_if_possible(list(actual)):
        yield from _walk(actual[key], expected[key], (*path, key))


def _sorted_if_possible(keys: list[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:
        return keys


def _is_sequence(value: Any) -> bool:
    script_list, _ = tensor_comparison.script_container_types()
    kinds = (
        Sequence,
        torch.nn.Sequential,
        torch.nn.ModuleList,
        torch.nn.ParameterList,
        torch.utils.data.Subset,
        script_list,
    )
    return isinstance(value, kinds) and not isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    _, script_dict = tensor_comparison.script_container_types()
    kinds = (
        Mapping,
        torch.nn.ModuleDict,
        torch.nn.ParameterDict,
        script_dict,
    )
    return isinstance(value, kinds)


def _unpack(actual: Any, expected: Any) -> tuple[Any, Any]:
    """Turn values that torch cannot compare as a whole into lists: nested tensors, arrays of dtypes unknown to it."""
    if _is_foreign_array(actual) or _is_foreign_array(expected):
        actual = _as_list(actual)
        expected = _as_list(expected)
    return _unbind(actual), _unbind(expected)


def _as_list(value: Any) -> Any:
    return value.tolist() if _is_tensor_like(value) else value


def _unbind(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.strided:
        return value.unbind()
    return value


def _are_dataclasses_to_walk(actual: Any, expected: Any) -> bool:
    """Whether these are dataclasses whose own `==` gives no bool, because a field is a tensor."""
    if type(actual) is not type(expected):
        return False
    if isinstance(actual, type) or not dataclasses.is_dataclass(actual):
        return False
    try:
        return not isinstance(actual == expected, bool)
    except RuntimeError as error:
        if not error_texts.is_of_ambiguous_tensor(error):
            raise
        return True


# -- leaves


def _compare_all(leaves: list[Leaf], rules: Rules) -> Iterator[tuple[ItemPath, str]]:
    """Yield the places that differ, with the differences."""
    for path, actual, expected in leaves:
        try:
            difference = _compare(actual, expected, rules)
        except Exception as error:
            if not path:
                raise
            raise _same_error(error, f"{error}{_place(path)}") from error
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
            return _difference(ours, theirs, rules)
    if all(_is_tensor_like(value) for value in pair):
        return _compare_tensors(torch.as_tensor(actual), torch.as_tensor(expected), rules)
    if all(isinstance(value, torch.storage.TypedStorage) for value in pair):
        return _compare_tensors(_stored(actual), _stored(expected), rules)
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


def _is_tensor_like(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_array(value)


def _is_foreign_array(value: Any) -> bool:
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
    return _is_number(value) or _is_tensor_like(value)


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
    if _is_tensor_like(value):
        return bool(_single_element(value, "boolean"))
    kind = type(value)
    if kind not in (bool, *_NUMBERS) and kind.__module__ != "numpy":
        raise TypeError(f"Unknown boolean type {kind}.")
    return bool(value)


def _to_number(value: Any) -> Any:
    if _is_tensor_like(value):
        number = _single_element(value, "number")
        return int(number) if isinstance(number, bool) else number
    if isinstance(value, enum.Enum):
        return int(value)  # type: ignore[call-overload]
    if _is_of_numpy(value, "number"):
        return value.item()
    return value


def _difference(actual: Any, expected: Any, rules: Rules, **checks: bool) -> str | None:
    """Compare two numbers or tensors; None where they are equal."""
    try:
        tensor_comparison.compare(
            actual,
            expected,
            rtol=rules.rtol,
            atol=rules.atol,
            rtol_floor=rules.rtol_floor,
            atol_floor=rules.atol_floor,
            equal_nan=rules.equal_nan,
            **checks,
        )
    except AssertionError as error:
        return str(error)
    return None


def _stored(storage: Any) -> torch.Tensor:
    """A tensor with the numbers of a storage."""
    dtype = _STORED_AS.get(storage.dtype, storage.dtype)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage.untyped())


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


# -- tensors


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, rules: Rules) -> str | None:
    """Compare two tensors; DTensors with equal layouts by the shards of this rank."""
    if _are_dtensors(actual, expected) and _can_compare_shards(actual, expected):
        actual, expected = actual.to_local(), expected.to_local()  # type: ignore[attr-defined]
    if rules.exact_is_coalesced and actual.layout == expected.layout == torch.sparse_coo:
        ours = actual.is_coalesced()
        theirs = expected.is_coalesced()
        if ours != theirs:
            return f"The values for attribute 'is_coalesced()' do not match: {ours} != {theirs}."
    difference = _difference(
        actual,
        expected,
        rules,
        check_dtype=rules.exact_dtype,
        check_device=rules.exact_device,
        check_layout=rules.exact_layout,
        check_stride=rules.exact_stride,
    )
    if difference is None:
        return None
    return difference + _values(actual, expected, difference)


_LISTED_ELEMENTS = 12
_INDEX_OF_DIFFERENCE = re.compile(r"^Greatest absolute difference: .* at index \(([\d, ]*)\)", re.MULTILINE)


def _values(actual: torch.Tensor, expected: torch.Tensor, difference: str) -> str:
    """Lines with the two: small ones whole, others at the index with the greatest difference."""
    match = _INDEX_OF_DIFFERENCE.search(difference)
    if match is None:
        return ""
    at = ""
    try:
        if actual.numel() > _LISTED_ELEMENTS:
            numbers = [number for number in match[1].split(",") if number.strip()]
            index = tuple(map(int, numbers))
            at = f" at index {index}"
            actual = actual[index]
            expected = expected[index]
        return f"\nExpected: {expected.tolist()}{at}\nGot:      {actual.tolist()}{at}"
    except Exception:
        # A layout, or a subclass, that has no such values.
        return ""


def _are_dtensors(actual: Any, expected: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    # No DTensor exists before that module is imported, which takes half a second.
    if module is None:
        return False
    ours = isinstance(actual, module.DTensor)
    theirs = isinstance(expected, module.DTensor)
    if ours != theirs:
        raise TypeError(
            "Comparing a DTensor to a non-DTensor is ambiguous: compare .full_tensor() for the whole tensor, "
            "or .to_local() for the shard of this rank."
        )
    return ours


def _layout_difference(actual: Any, expected: Any) -> str | None:
    if actual.placements != expected.placements:
        return f"DTensor placements do not match: {actual.placements} != {expected.placements}"
    if actual.device_mesh != expected.device_mesh:
        return f"DTensor device meshes do not match: {actual.device_mesh} != {expected.device_mesh}"
    return None


def _can_compare_shards(actual: Any, expected: Any) -> bool:
    """Whether each rank can compare its own shards alone. Not for partial sums: only their totals count."""
    if any(placement.is_partial() for placement in actual.placements):
        return False
    return actual.shape == expected.shape and _layout_difference(actual, expected) is None
