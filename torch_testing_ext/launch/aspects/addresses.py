"""Addresses: where the ranks of a test meet. Their ports are reserved as long as the ranks live."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


class Addresses(Aspect):
    """Leases the ports of a test, and gives its ranks the variables by which they meet."""

    name = "addresses"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "the class gives its processes their variables",
            HostKind.THREADS: "threads share the variables of their process, and meet in its memory",
            HostKind.WORLD: "the ranks of a world never meet: each has a store of its own",
        }
    )

    def equip(self, attempt: RankAttempt) -> None:
        from torch_testing_ext.launch import rank_variables

        plan = attempt.plan
        leased = rank_variables.leased_variables(plan.world_size, keep=plan.keeps_port)
        attempt.environ = {**attempt.resources.enter_context(leased), **attempt.environ}


ADDRESSES = Addresses()
