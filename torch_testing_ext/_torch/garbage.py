"""Spares the collector of cyclic garbage what importing torch has left: some hundred thousand objects that stay."""

from __future__ import annotations

import gc


def postpone_collection() -> None:
    """Have the next full collection come later: one takes a tenth of a second, and the last import may be at fault.

    All objects become old ones, and the collector counts from zero again. Nothing is exempt from collection.
    """
    if not gc.get_freeze_count():  # what somebody has exempted stays exempt
        gc.freeze()
        gc.unfreeze()


def exempt_imported() -> None:
    """Exempt all that exists from collection, but for new garbage, as `run_test.py` and the fork server do.

    The collections at the interpreter's end would otherwise take a quarter of the time of a short program.
    """
    gc.collect(1)
    gc.freeze()
