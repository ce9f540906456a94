"""Has classes with ranks share the examples of Hypothesis's own `given`. Imports Hypothesis only where a test has."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

from torch_testing_ext._testing.bases import ranked_test_case

# Classes whose properties are shared.
_seen = weakref.WeakSet[type]()


def share_examples(cls: type) -> None:
    """Let all ranks get the same examples of each property of a class, whose `given` may be Hypothesis's own."""
    if "hypothesis" in sys.modules:
        for base in cls.__mro__:
            if base not in _seen:
                _share_in(base)
                _seen.add(base)


def _share_in(cls: Any) -> None:
    from .given_in_ranks import for_all_ranks

    for name, member in list(vars(cls).items()):
        if isinstance(member, types.FunctionType) and getattr(member, "is_hypothesis_test", False):
            setattr(cls, name, for_all_ranks(member))


ranked_test_case.before_tests.append(share_examples)
