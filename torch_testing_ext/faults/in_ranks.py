"""Questions that a test with faults may ask in its ranks."""

from torch_testing_ext import fault_points


def heal(rank: int) -> None:
    """In another rank: let a rank go on that a fault has stopped. Waits until the fault has happened."""
    if fault_points.rank is None:
        raise RuntimeError("heal() is for the ranks of a test with @faults")
    fault_points.rank.heal(rank)


def loses_ranks() -> bool:
    """Whether faults of this test kill ranks, so that no barrier of all ranks can follow."""
    return fault_points.rank is not None and bool(fault_points.rank.loses_ranks)


def incarnation() -> int:
    """The number of processes of this rank that have died by faults of the test before."""
    return 0 if fault_points.rank is None else int(fault_points.rank.incarnation)
