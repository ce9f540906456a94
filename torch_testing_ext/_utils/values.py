"""Small functions about values: iterables, tensors in arguments, dtypes of NumPy, outputs with gradients."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

GRADCHECK_NONDET_TOL = 1e-12
# The precisions that PyTorch's oldest tests assume; its name asks not to use it in new ones.
dtype2prec_DONTUSE = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2, torch.bfloat16: 1e-1}


def is_iterable(obj: Any) -> bool:
    try:
        iter(obj)
    except TypeError:
        return False
    return True


def is_iterable_of_tensors(iterable: Any, include_empty: bool = False) -> bool:
    """Are there only tensors in a sized iterable that is no tensor itself? `include_empty` is the answer for none."""
    if isinstance(iterable, torch.Tensor):
        return False
    try:
        if len(iterable) == 0:
            return include_empty
        return all(isinstance(item, torch.Tensor) for item in iterable)
    except TypeError:
        return False


def iter_indices(tensor: torch.Tensor) -> Iterable[Any]:
    """Iterate over the indices of all elements: numbers for a vector, none for a scalar, else tuples."""
    if tensor.dim() < 2:
        return range(tensor.numel() if tensor.dim() else 0)
    return itertools.product(*map(range, tensor.shape))


def get_function_arglist(func: Callable[..., Any]) -> list[str]:
    return inspect.getfullargspec(func).args


def get_tensors_from(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[torch.Tensor]:
    return {value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}


# -- NumPy


_NUMPY_DTYPES = {
    "bool_": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def numpy_to_torch_dtypes() -> dict[Any, torch.dtype]:
    """Map NumPy's scalar types to torch's dtypes. Imports NumPy."""
    import numpy

    return {getattr(numpy, name): dtype for name, dtype in _NUMPY_DTYPES.items()}


def torch_to_numpy_dtypes() -> dict[torch.dtype, Any]:
    """Map torch's dtypes to NumPy's scalar types, two of them to larger ones. Imports NumPy."""
    import numpy

    same = {dtype: scalar for scalar, dtype in numpy_to_torch_dtypes().items()}
    return {**same, torch.bfloat16: numpy.float32, torch.complex32: numpy.complex64}


def numpy_to_torch_dtype(np_dtype: Any) -> torch.dtype:
    """Return torch's dtype for a scalar type or a dtype of NumPy; a KeyError if there is none."""
    known = numpy_to_torch_dtypes()
    return known[np_dtype] if np_dtype in known else known[np_dtype.type]


def has_corresponding_torch_dtype(np_dtype: Any) -> bool:
    try:
        numpy_to_torch_dtype(np_dtype)
    except KeyError:
        return False
    return True


# -- outputs and gradients


def outs_and_grads(fn: Callable[..., Any], graph_inps: Sequence[Any], inps: Any) -> tuple[Any, list[Any]]:
    """Call `fn(*graph_inps)` and run backward from all outputs. Return these and the gradients of `inps`, now reset."""
    outputs = fn(*graph_inps)
    for output in _tensors(outputs):
        if output.requires_grad:
            torch.autograd.backward(output.sum(), retain_graph=True)
    gradients = [tensor.grad for tensor in _tensors(inps)]
    for tensor in _tensors(inps):
        tensor.grad = None
    return outputs, gradients


def compare_equal_outs_and_grads(
    test: Any, m1: Callable[..., Any], m2: Callable[..., Any], inps: Sequence[Any]
) -> None:
    """Assert that two functions have the same outputs and gradients for these inputs."""
    (outputs, gradients), (other_outputs, other_gradients) = (outs_and_grads(fn, inps, inps) for fn in (m1, m2))
    test.assertEqual(outputs, other_outputs)
    test.assertEqual(gradients, other_gradients)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
