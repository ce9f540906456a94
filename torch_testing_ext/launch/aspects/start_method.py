"""The start method: how the processes of ranks come about."""

from __future__ import annotations

from types import MappingProxyType

from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.start_settings import START


class MethodOfStart(Aspect):
    """Lets the user choose a start method; else it is the fastest one that is safe."""

    name = "start method"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.OWN: "the class starts its ranks itself",
            HostKind.THREADS: "threads are no processes",
            HostKind.TORCHRUN: "torchrun starts the ranks",
            HostKind.LAUNCHED: "the launcher has started the ranks",
            HostKind.WORLD: "each rank of a world is a fork",
        }
    )
    settings = (START,)


START_METHOD = MethodOfStart()
