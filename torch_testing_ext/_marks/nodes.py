"""`@multi_node`, for tests whose ranks may be on several nodes of a cluster."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
_ATTRIBUTE = "_torch_testing_ext_multi_node"


def multi_node(target: T) -> T:
    """Decorator: let run_test.py place the ranks of a test, or of each test in a class, on several nodes of a cluster.

    It does so if no node has room for all of them. Elsewhere it has no effect.
    """
    if not callable(target):
        raise TypeError(f"@multi_node takes no arguments; it was applied to {target!r}")
    setattr(target, _ATTRIBUTE, True)
    return target


def is_multi_node(*targets: Any) -> bool:
    """Has one of these functions and classes `@multi_node`?"""
    return any(hasattr(target, _ATTRIBUTE) for target in targets)
