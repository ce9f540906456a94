"""Importing this prepares the process to compile by inductor, so that ranks forked from it need not do this each.

Preload hints name this module, as they name torch's: the fork server imports it, and the process that forks workers.
"""

from __future__ import annotations

from torch_testing_ext import _torch
from torch_testing_ext._machine import accelerators

# On a machine with accelerators, patterns are registered for the device of the first graph: that is the rank's choice.
if not accelerators.device_may_exist():
    _torch.prepare_for_cpp()
    _torch.register_patterns_for_cpu()
