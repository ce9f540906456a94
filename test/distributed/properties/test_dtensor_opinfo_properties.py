"""Operations of torch's OpInfo database on DTensors: every rank gets the answer of one device, or all refuse.

dtensor_opinfo_support.py lists what torch gets wrong, and what it has not always answered. A run takes the calls of
dtensor_opinfo_examples.py, which torch must answer; a search draws any from the database, which torch may refuse.
"""

import re
from datetime import timedelta

import dtensor_opinfo_examples as examples
import torch.distributed as dist
from dtensor_opinfo_support import is_known_to_fail, may_be_refused
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    HealthCheck,
    assume,
    distribute,
    given,
    reject,
    replay,
    settings,
)

LOST_PEER = "losed by peer|Socket closed"  # the error of a rank whose wait for another rank was interrupted
PROFILE = settings(max_examples=100, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
ANSWERED = "answered"
# For a rank to answer or refuse once another has refused. The watchdog of a property gives a rank 15 seconds.
LISTING_TIMEOUT = timedelta(seconds=10)


def of_the_database(_):
    """Strategy: calls of the operations in the database, which only a search imports."""
    from dtensor_opinfo_database import calls

    return calls()


@requires_gloo()
class TestOpInfo(MultiProcessTestCase):
    world_size = 4
    count = 0  # of examples that this rank has begun: the same number in all ranks

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def endings(self, mine):
        """Tell the other ranks how the call ended in this one. Return how it ended in each if this one refused it.

        Through a file, not through the network: the others may wait for a rank that has refused.
        """
        self.store = getattr(self, "store", None) or dist.FileStore(f"{self.file_name}.endings", self.world_size)
        self.store.set(f"{self.count}/{self.rank}", mine)
        if mine == ANSWERED:
            return [mine]
        return [self.ending_of(rank, mine) for rank in range(self.world_size)]

    def ending_of(self, rank, mine):
        try:
            self.store.wait([f"{self.count}/{rank}"], LISTING_TIMEOUT)
        except RuntimeError:
            raise AssertionError(f"rank {rank} has not ended its call; this rank: {mine}") from None
        return self.store.get(f"{self.count}/{rank}").decode()

    @PROFILE
    @replay(examples.RESULTS)
    @given(case=st.none().flatmap(of_the_database))
    def test_results(self, case):
        self.check_results(*case)

    def check_results(self, mesh, call):
        self.count += 1
        assume(not is_known_to_fail(mesh, call))
        try:
            wanted = call.run([one.clone() for one in call.tensors])
        except Exception:
            if not may_be_refused(call):
                raise
            reject()
        try:
            placed = zip(call.tensors, call.placements, strict=True)
            results = call.run([distribute(one.clone(), mesh, chosen) for one, chosen in placed])
            got = [one.full_tensor() if isinstance(one, DTensor) else one for one in results]
        except Exception as error:
            if re.search(LOST_PEER, str(error)):
                raise
            endings = self.endings(f"refused: {type(error).__name__}: {error}")
        else:
            endings = self.endings(ANSWERED)
        if ANSWERED not in endings and may_be_refused(call):
            reject()
        self.assertEqual(set(endings), {ANSWERED})
        self.assertEqual(got, wanted)


if __name__ == "__main__":
    run_tests()
