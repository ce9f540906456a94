"""Names of places in your code, for tests with faults. Imports nothing; outside of such tests it does nothing."""

# The rank of a test with faults that this process is: see `_collectives/sanitizer/faults_of_rank.py`.
rank = None


def fault_point(name):  # type: ignore[no-untyped-def]  # typing is an import
    """A place at which a fault can happen: `mark(name)`."""
    if rank is not None:
        rank.mark(name)


def reached(name):  # type: ignore[no-untyped-def]
    """A line that a test may require to have run: `must_reach=[name]`."""
    if rank is not None:
        rank.reached(name)
