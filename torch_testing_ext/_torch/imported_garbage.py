"""The collector of cyclic garbage, for which importing torch leaves some hundred thousand objects that stay."""

import gc


def postpone_collection() -> None:
    """Have the next full collection come later: one takes a tenth of a second, and the last import costs one.

    All objects become old ones, and the collector counts from zero again. Nothing is exempt from collection.
    """
    if not gc.get_freeze_count():  # what somebody has exempted stays exempt
        gc.freeze()
        gc.unfreeze()


_exempted = False


def exempt_imported(garbage: int | None = 1) -> None:
    """Exempt all that exists from collection, so that the collectors of forked processes do not write to shared pages.

    Also, the collections at the interpreter's end would otherwise take a quarter of the time of a short program.
    `garbage`: the oldest generation from which garbage is collected first, 2 for all. With None, none is: in a forked
    process, finalizers would act on what its parent has.
    """
    global _exempted
    if garbage is not None:
        gc.collect(garbage)
    gc.freeze()
    _exempted = True


def has_exempted_imported() -> bool:
    """Whether this process, or the one that it was forked from, has exempted what it had imported.

    `gc.get_freeze_count` would count all of these objects, which takes 10 ms.
    """
    return _exempted
