"""What an import leaves is exempt from collection, and nothing else."""

import gc

from kit.own_process import in_own_process

from torch_testing_ext._torch import imported_garbage


class Node:
    """An object that collections can find."""


@in_own_process
def test_postponed_collection():
    """All objects become old, and nothing stays exempt."""
    gc.unfreeze()
    gc.disable()
    young = Node()
    imported_garbage.postpone_collection()
    assert gc.get_freeze_count() == 0 and not imported_garbage.has_exempted_imported()
    assert not any(found is young for generation in (0, 1) for found in gc.get_objects(generation))


@in_own_process
def test_exempt_stays_exempt():
    gc.disable()
    gc.freeze()
    exempt = gc.get_freeze_count()
    imported_garbage.postpone_collection()
    assert gc.get_freeze_count() >= exempt > 0


@in_own_process
def test_exemption():
    gc.unfreeze()
    gc.disable()
    gc.collect()
    kept, ended = Node(), []
    garbage = Node()
    garbage.itself = garbage
    garbage.end = type("End", (), {"__del__": lambda _: ended.append(True)})()
    del garbage
    imported_garbage.exempt_imported(None)
    # In a forked process, finalizers would act on what its parent has.
    assert not ended and imported_garbage.has_exempted_imported()
    assert not any(found is kept for found in gc.get_objects())
    gc.unfreeze()
    imported_garbage.exempt_imported(2)
    assert ended and gc.get_freeze_count() > 0
