"""The comparison of two tensors."""

import re
import sys
from typing import Any

import torch

from torch_testing_ext._torch.tensors import tensor_comparison

from .equality_rules import Rules

_STORED_AS = {
    torch.quint8: torch.uint8,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
}


def tensor_difference(actual: Any, expected: Any, rules: Rules, **checks: bool) -> str | None:
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


def as_stored(storage: Any) -> torch.Tensor:
    """A tensor with the numbers of a storage."""
    dtype = _STORED_AS.get(storage.dtype, storage.dtype)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage.untyped())


def compare_tensors(actual: torch.Tensor, expected: torch.Tensor, rules: Rules) -> str | None:
    """Compare two tensors; DTensors with equal layouts by the shards of this rank."""
    if are_dtensors(actual, expected) and _can_compare_shards(actual, expected):
        actual, expected = actual.to_local(), expected.to_local()  # type: ignore[attr-defined]
    if rules.exact_is_coalesced and actual.layout == expected.layout == torch.sparse_coo:
        ours = actual.is_coalesced()
        theirs = expected.is_coalesced()
        if ours != theirs:
            return f"The values for attribute 'is_coalesced()' do not match: {ours} != {theirs}."
    difference = tensor_difference(
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


def are_dtensors(actual: Any, expected: Any) -> bool:
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


def layout_difference(actual: Any, expected: Any) -> str | None:
    if actual.placements != expected.placements:
        return f"DTensor placements do not match: {actual.placements} != {expected.placements}"
    if actual.device_mesh != expected.device_mesh:
        return f"DTensor device meshes do not match: {actual.device_mesh} != {expected.device_mesh}"
    return None


def _can_compare_shards(actual: Any, expected: Any) -> bool:
    """Whether each rank can compare its own shards alone. Not for partial sums: only their totals count."""
    if any(placement.is_partial() for placement in actual.placements):
        return False
    return actual.shape == expected.shape and layout_difference(actual, expected) is None
