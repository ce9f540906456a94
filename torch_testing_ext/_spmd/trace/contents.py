"""The contents of objects that no attribute shows: the bytes of arrays and buffers, the state of random generators."""

from __future__ import annotations

import array
import sys
from typing import Any

import torch


def generator_state(value: Any) -> Any:
    """A copy of the state of a random generator of Python or numpy; None for any other object."""
    if isinstance(value, (torch.Generator, type)):
        return None
    if callable(getattr(value, "getstate", None)):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state() if type(value).__name__ == "RandomState" else None


def content_of(value: Any) -> bytes:
    """The bytes of an array or buffer."""
    return value.tobytes() if hasattr(value, "tobytes") else bytes(value)


def put_content(value: Any, content: bytes) -> None:
    """Write the bytes of an array or buffer back."""
    if is_array(value):
        value[...] = sys.modules["numpy"].frombuffer(content, value.dtype).reshape(value.shape)
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, content)
    elif isinstance(value, memoryview) and not value.c_contiguous:
        value[:] = memoryview(content).cast(value.format)  # type: ignore[call-overload]
    else:
        memoryview(value).cast("B")[:] = content


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numpy."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "dtype")
