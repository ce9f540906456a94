"""Starts, watches, ends and judges ranks. Depends on processes, files and signals, not on a test framework.

Imports `_process`, `_collectives`, `_machine` and `_torch`, and torch itself only in ranks.

run = launch(Job(...))            start the ranks, in milliseconds; each runs a body in its RankContext
result = watch(run, ...)          watch them until all have ended
verdict = result.verdict(Case())  judge them: one outcome and one message for all ranks

`judging` explains failures, `persistent_ranks` has ranks that run one task after another: import them where they are
needed, since a test that passes on ranks of its own does without. The names of `exports` are imported at their first
use: the declarations of `aspects` need none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exports import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import a module of this package, or a name of `exports`."""
        module = f"{__name__}.{name}"
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module)
        exports = vars(importlib.import_module(f"{__name__}.exports"))
        globals().update((name, value) for name, value in exports.items() if not name.startswith("_"))
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
