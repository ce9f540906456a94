"""[c10d][test] Reconfigure after a rank has really been killed

Problem: the tests of shrinking exclude a rank that is alive. It waits in a
barrier of the store until the others are done, so no connection breaks, and no
collective is under way. In the review of #180611 it was asked what happens if
the excluded rank crashed: "would the healthy ranks also hang?" No test says so.

Fix: kill a rank by SIGKILL, in turn the last, a middle and the first one. The
survivors notice it by the collective that they are in, reconfigure without it,
and run a collective. Only gloo: it needs no devices.

A survivor that has got the error leaves the collective, and another one may
wait for it there, also after `abort()`, until the timeout. So that is short.

The helpers of the existing tests become a class of their own, so that the new
class does not repeat these tests. A killed rank has no result: it is checked
that it ended by SIGKILL, and the other ranks are checked as before.

Test plan: python test/distributed/test_c10d_fault_tolerance.py -k KilledRank
"""

FILE = "test/distributed/test_c10d_fault_tolerance.py"
CLASS = "AbstractFaultToleranceTest"

KILLED = '''\
@unittest.skipIf(not dist.is_backend_available("gloo"), "gloo backend is not available")
class GlooKilledRankTest(FaultToleranceTestBase, MultiProcessTestCase):
    """The rank that the others exclude is killed while they wait for it."""

    backend_name = "gloo"
    device_type = "cpu"
    KILLED_RANKS = {
        "test_shrink_last_rank_killed": 2,
        "test_shrink_middle_rank_killed": 1,
        "test_shrink_first_rank_killed": 0,
    }

    def _check_return_codes(self, fn, elapsed_time):
        killed = self.processes.pop(self.KILLED_RANKS[self._testMethodName])
        self.assertEqual(killed.exitcode, -signal.SIGKILL)
        super()._check_return_codes(fn, elapsed_time)

    def _shrink_to_survivors(self, uuid):
        killed_rank = self.KILLED_RANKS[self._testMethodName]
        handles = self._create_reconfigured_pg(self._testMethodName, uuid)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))
        if self.rank == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        # A survivor may wait for another one that has seen the loss and left.
        self.backend.set_timeout(timedelta(seconds=2))
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(4, device=self.device))
        self.backend.set_timeout(timedelta(seconds=30))

        handles.pop(killed_rank)
        self._reconfigure(uuid + 1, handles)
        self.assertEqual(dist.get_world_size(), self.world_size - 1)
        self.assertEqual(dist.get_rank(), self.rank - (self.rank > killed_rank))
        self._assert_all_reduce_sum(sum(range(1, self.world_size)))

    def test_shrink_last_rank_killed(self):
        self._shrink_to_survivors(1400)

    def test_shrink_middle_rank_killed(self):
        self._shrink_to_survivors(1500)

    def test_shrink_first_rank_killed(self):
        self._shrink_to_survivors(1600)


'''


def edit(source):
    source.sub("", r"^import os\nimport sys\n", "import os\nimport signal\nimport sys\n")
    source.sub(CLASS, r"^    def test_reconfigure_basic\(", rf"\nclass {CLASS}(FaultToleranceTestBase):\n\g<0>")
    source.sub("", rf"^class {CLASS}:\n", "class FaultToleranceTestBase:\n")
    source.sub("", r"^class ReconfigureContractTest\b", lambda match: KILLED + match[0])
