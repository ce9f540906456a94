"""Containers, taken apart to their leaves."""

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_testing_ext._torch.signs import error_texts
from torch_testing_ext._torch.tensors import tensor_comparison

from .equal_leaves import is_foreign_array, is_tensor_like
from .equality_rules import ItemPath, Leaf

LISTED_ITEMS = 10
SHORT = reprlib.Repr()


class Different(Exception):
    """Raised for two containers of different structure."""

    def __init__(self, path: ItemPath, text: str) -> None:
        super().__init__(text)
        self.path = path
        self.text = text


def as_tensor_beside(value: Any, other: Any) -> Any:
    """Convert a sequence that is compared with a tensor to a tensor like it; only at the top, not inside containers."""
    if isinstance(other, torch.Tensor) and isinstance(value, Sequence):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device)
    return value


def walk(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    """Yield the pairs of leaves below a place. Raises Different where the structure differs."""
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
            yield from walk(ours, theirs, (*path, field.name))


def _walk_sequences(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    if len(actual) != len(expected):
        raise Different(path, _length_difference(actual, expected))
    for index in range(len(actual)):
        yield from walk(actual[index], expected[index], (*path, index))


def _length_difference(actual: Any, expected: Any) -> str:
    if len(actual) > len(expected):
        which, longer, start = "first", actual, len(expected)
    else:
        which, longer, start = "second", expected, len(actual)
    end = min(len(longer), start + LISTED_ITEMS)
    rest = [longer[index] for index in range(start, end)]
    return (
        f"The length of the sequences mismatch: {len(actual)} != {len(expected)}\n"
        f"The {which} goes on with {SHORT.repr(rest)}"
    )


def _walk_mappings(actual: Any, expected: Any, path: ItemPath) -> Iterator[Leaf]:
    missing = [key for key in expected if key not in actual]
    added = [key for key in actual if key not in expected]
    if missing or added:
        raise Different(
            path,
            "The keys of the mappings do not match:\n"
            f"Missing keys in the actual mapping: {_sorted_if_possible(missing)}\n"
            f"Additional keys in the actual mapping: {_sorted_if_possible(added)}",
        )
    for key in _sorted_if_possible(list(actual)):
        yield from walk(actual[key], expected[key], (*path, key))


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
    if is_foreign_array(actual) or is_foreign_array(expected):
        actual = _as_list(actual)
        expected = _as_list(expected)
    return _unbind(actual), _unbind(expected)


def _as_list(value: Any) -> Any:
    return value.tolist() if is_tensor_like(value) else value


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
