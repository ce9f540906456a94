"""Operations of torch's OpInfo database on DTensors: every rank gets the answer of one device, or all refuse.

dtensor_opinfo_support.py lists what torch gets wrong. A run takes fixed cases, so that another version of Hypothesis
does not draw calls that no one has looked at; a search draws any.
"""

import functools
import re
from datetime import timedelta

import torch.distributed as dist
from dtensor_opinfo_support import OPERATIONS, calls, fixed_cases, is_known_to_fail
from torch.distributed.tensor import DTensor

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    HealthCheck,
    Phase,
    assume,
    distribute,
    example,
    given,
    reject,
    settings,
)

LOST_PEER = "losed by peer|Socket closed"  # the error of a rank whose wait for another rank was interrupted
PROFILE = settings(
    phases=[Phase.explicit], max_examples=100, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
ANSWERED = "answered"
# For a rank to answer or refuse once another has refused. The watchdog of a property gives a rank 15 seconds.
LISTING_TIMEOUT = timedelta(seconds=10)


def in_every_run(prop):
    """Let a property have the fixed cases."""
    return functools.reduce(lambda done, case: example(case=case)(done), reversed(fixed_cases()), prop)


class TestOpInfo(MultiProcessTestCase):
    world_size = 4
    examples = 0  # that this rank has begun: the same number in all ranks

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def endings(self, mine):
        """Tell the other ranks how the call ended in this one. Return how it ended in each if this one refused it.

        Through a file, not through the network: the others may wait for a rank that has refused.
        """
        self.store = getattr(self, "store", None) or dist.FileStore(f"{self.file_name}.endings", self.world_size)
        self.store.set(f"{self.examples}/{self.rank}", mine)
        if mine == ANSWERED:
            return [mine]
        return [self.ending_of(rank, mine) for rank in range(self.world_size)]

    def ending_of(self, rank, mine):
        try:
            self.store.wait([f"{self.examples}/{rank}"], LISTING_TIMEOUT)
        except RuntimeError:
            raise AssertionError(f"rank {rank} has not ended its call; this rank: {mine}") from None
        return self.store.get(f"{self.examples}/{rank}").decode()

    @PROFILE
    @in_every_run
    @given(case=calls(sorted(OPERATIONS)))
    def test_results(self, case):
        self.check_results(*case)

    def check_results(self, mesh, call):
        self.examples += 1
        assume(not is_known_to_fail(mesh, call))
        try:
            wanted = call.run([one.clone() for one in call.sample.tensors])
        except Exception:
            reject()
        try:
            placed = zip(call.sample.tensors, call.placements, strict=True)
            results = call.run([distribute(one.clone(), mesh, chosen) for one, chosen in placed])
            got = [one.full_tensor() if isinstance(one, DTensor) else one for one in results]
        except Exception as error:
            if re.search(LOST_PEER, str(error)):
                raise
            endings = self.endings(f"refused: {type(error).__name__}: {error}")
        else:
            endings = self.endings(ANSWERED)
        if ANSWERED not in endings:
            reject()
        self.assertEqual(set(endings), {ANSWERED})
        self.assertEqual(got, wanted)


if __name__ == "__main__":
    run_tests()
