"""The functions of torch that know how the parts of a tensor are put together; their collectives do not."""

from __future__ import annotations

import os
import sys
from typing import Any

# By function, the arguments that say it: of `_redistribute` and `_functional_collectives`, 2.11 to 2.15.
_FILES = (os.path.join("tensor", "_redistribute.py"), "_functional_collectives.py")
_ARGUMENTS = {
    "redistribute_local_tensor": ("current_spec", "target_spec"),
    "all_gather_tensor": ("gather_dim",),
    "all_gather_single": ("gather_dim",),
}


def parts_of(frame: Any) -> tuple[str, ...]:
    """Read from the function of a frame what it says about parts: placements, or a dimension. Nothing gives ()."""
    code = frame.f_code
    if code.co_name not in _ARGUMENTS or not code.co_filename.endswith(_FILES):
        return ()
    variables = frame.f_locals
    given = [(name, variables[name]) for name in _ARGUMENTS[code.co_name] if name in variables]
    if sys.version_info < (3, 13):
        variables.clear()  # else this copy would keep tensors alive
    return tuple(str(value.placements) if name.endswith("spec") else f"{name} {value}" for name, value in given)
