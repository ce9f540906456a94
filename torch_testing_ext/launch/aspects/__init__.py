"""Aspects of a test in ranks, such as its time limit or its devices: a module for each."""

from __future__ import annotations

from torch_testing_ext.launch.aspect import Aspect

from .addresses import ADDRESSES
from .budgets_of_tests import BUDGETS
from .debugger import DEBUGGER
from .delays import DELAYS
from .devices import DEVICES
from .fake_accelerators import FAKE_ACCELERATORS
from .faults import FAULTS
from .growth import GROWTH
from .lanes import LANES_OF_RANKS
from .leftovers import LEFTOVERS
from .nodes import NODES_OF_TEST
from .output import OUTPUT
from .remarks import REMARKS as REMARKS
from .sanitizer import SANITIZER
from .start_method import START_METHOD
from .time_limit import TIME_LIMIT
from .warnings_of_ranks import WARNINGS
from .world import WORLD

# In the order in which they prepare an attempt. At its end they are called in the opposite order.
ASPECTS: tuple[Aspect, ...] = (
    WORLD,
    START_METHOD,
    TIME_LIMIT,
    ADDRESSES,
    FAKE_ACCELERATORS,
    DEVICES,
    NODES_OF_TEST,
    SANITIZER,
    DELAYS,
    FAULTS,
    DEBUGGER,
    OUTPUT,
    LANES_OF_RANKS,
    LEFTOVERS,
    REMARKS,
    BUDGETS,
    GROWTH,
    WARNINGS,
)
