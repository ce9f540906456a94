"""Aspects: what one may ask of a test in ranks, one module for each."""

from __future__ import annotations

from torch_testing_ext.launch.aspects.leftovers import LEFTOVERS
from torch_testing_ext.launch.attempts import Aspect

from .addresses import ADDRESSES
from .devices import DEVICES
from .faults import FAULTS
from .rank_warnings import WARNINGS
from .remarks import REMARKS as REMARKS
from .sanitizer import SANITIZER

# In the order in which they prepare an attempt. At its end they are called in the opposite order.
ASPECTS: tuple[Aspect, ...] = (ADDRESSES, DEVICES, SANITIZER, FAULTS, LEFTOVERS, REMARKS, WARNINGS)
