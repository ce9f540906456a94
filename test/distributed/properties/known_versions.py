"""The versions of torch that we have looked at, for what is known to be wrong with them."""

import warnings
from typing import Any

import torch

FIRST_UNKNOWN = (2, 16)  # the first version that we have not looked at
VERSION: Any = torch.__version__  # it compares with tuples
Versions = tuple[tuple[int, int], tuple[int, int]]
ALL: Versions = ((2, 0), (99, 0))


def is_in(versions: Versions) -> bool:
    """Is this torch one of the versions from the first up to, but excluding, the second?"""
    since, until = versions
    return bool(since <= VERSION < until)


def repaired(news: str) -> None:
    """Report that a known fault of torch is gone: an error in a version that we know, and a warning in a newer one."""
    if VERSION < FIRST_UNKNOWN:
        raise AssertionError(f"torch {torch.__version__} {news}")
    warnings.warn(f"torch {torch.__version__}, which we do not know yet, {news}", stacklevel=2)
