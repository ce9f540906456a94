"""Addresses: where the ranks of a test meet. Their ports belong to nobody else as long as the ranks live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_testing_ext.launch import environment
from torch_testing_ext.launch.attempts import Aspect

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


class Addresses(Aspect):
    """Leases the ports of a test, and gives its ranks the variables by which they meet."""

    name = "addresses"

    def equip(self, attempt: RankAttempt) -> None:
        plan = attempt.plan
        leased = environment.leased_variables(plan.world_size, keep=plan.keeps_port)
        attempt.environ = {**attempt.resources.enter_context(leased), **attempt.environ}


ADDRESSES = Addresses()
