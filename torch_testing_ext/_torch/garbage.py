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


def exempt_imported(garbage: int | None = 1) -> None:
    """Exempt all that exists from collection, so that the collectors of forked processes do not write to shared pages.

    Also, the collections at the interpreter's end would otherwise take a quarter of the time of a short program.
    `garbage`: the oldest generation from which garbage is collected first, 2 for all. With None, none is: in a forked
    process, finalizers would act on what its parent has.
    """
    if garbage is not None:
        gc.collect(garbage)
    gc.freeze()
