"""Verification: a call that runs a program and the engine on the same state, and compares what they leave behind.

All ranks verify in the same call. If the two differ anywhere, all ranks undo the call and raise an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from ..engine.engine_core import StateEngine
from ..engine.state_finder import FoundState
from ..spmd_errors import SPMDError
from .comparison import first_difference, record_run
from .snapshot import StateSnapshot

VerifyMode = Literal["first", "always", "off"]
VERIFIES = 4  # the bit of a header that asks all ranks to verify
_ONE_IN = 100


def is_drawn(step: int, call: int) -> bool:
    """Whether a call of a step is verified at random. All ranks draw the same."""
    return zlib.crc32(b"%d %d" % (step, call)) % _ONE_IN == 0


class Verification:
    """One call of a step that is run both ways."""

    def __init__(self, engine: StateEngine, found: FoundState, tensors: Iterable[torch.Tensor], together: bool) -> None:
        self._engine, self._found, self._together = engine, found, together
        self._before = StateSnapshot(found, tensors)

    def run(self, eager: Callable[[], Any], compiled: Callable[[], Any]) -> Any:
        """Return the result of `compiled`, or raise an error on all ranks."""
        try:
            theirs = record_run(eager(), self._found)
            self._before.restore()
            result = compiled()
            found = first_difference(record_run(result, self._found), theirs)
            self._raise_difference(self._engine.wire.gather_objects(found) if self._together else [found])
        except BaseException:
            self._before.restore()
            raise
        return result

    def _raise_difference(self, differences: list[str | None]) -> None:
        for rank, difference in enumerate(differences):
            if difference is not None:
                where = f", on rank {rank}" if self._together else ""
                raise SPMDError(
                    f"The compiled step is not equivalent to the engine: {difference}{where}. Both ran on the same "
                    "batch; the call has been undone.",
                    remedy="The step depends on something that is not recorded, or that is recorded wrongly: drop "
                    'backend=. Or pass compile(verify="off") if the difference does not matter.',
                )
