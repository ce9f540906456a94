"""Names of places in code that trains, for tests with faults: copy this file, or install it; it imports nothing.

Outside of a test with faults the functions do nothing. `torch_testing_ext` finds the places by their names.
"""

import sys

_IN_TESTS = "torch_testing_ext.fault_points"


def fault_point(name):  # type: ignore[no-untyped-def]  # typing is an import
    """A place at which a fault can happen: `mark(name)`."""
    kit = sys.modules.get(_IN_TESTS)
    if kit is not None:
        kit.fault_point(name)


def reached(name):  # type: ignore[no-untyped-def]
    """A line that a test may require to have run: `must_reach=[name]`."""
    kit = sys.modules.get(_IN_TESTS)
    if kit is not None:
        kit.reached(name)
