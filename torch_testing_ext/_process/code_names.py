"""The names in a piece of code."""

import functools
from types import CodeType


@functools.lru_cache(1024)
def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a piece of code, and in the functions that it defines."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
