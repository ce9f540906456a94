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

The new class has the helpers of the existing tests, but does not repeat these
tests. A killed rank has no result: it is checked that it ended by SIGKILL, and
the other ranks are checked as before.

Test plan: python test/distributed/test_c10d_fault_tolerance.py -k KilledRank
"""

FILE = "test/distributed/test_c10d_fault_tolerance.py"
CLASS = "AbstractFaultToleranceTest"

KILLED = '''\
@unittest.skipIf(not dist.is_backend_available("gloo"), "gloo backend is not available")
class GlooKilledRankTest(BASE, MultiProcessTestCase):
    """The rank that the others exclude is killed while they wait for it."""

    # classification
    backend_name = "gloo"
    KILLED_RANKS = {
        "test_shrink_last_rank_killed": 2,
        "test_shrink_middle_rank_killed": 1,
        "test_shrink_first_rank_killed": 0,
    }

    @property
    def killed_rank(self):
        return self.KILLED_RANKS[self._testMethodName]

    def _check_return_codes(self, fn, elapsed_time):
        killed = self.processes.pop(self.killed_rank)
        self.assertEqual(killed.exitcode, -signal.SIGKILL)
        super()._check_return_codes(fn, elapsed_time)

    def _shrink_to_survivors(self, uuid, PARAMETER):
        killed_rank = self.killed_rank
        # device
        handles = self._create_reconfigured_pg(self._testMethodName, uuid, DEVICE)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)), DEVICE)
        if self.rank == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        # A survivor may wait for another one that has seen the loss and left.
        self.backend.set_timeout(timedelta(seconds=2))
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(4))
        self.backend.set_timeout(timedelta(seconds=30))

        handles.pop(killed_rank)
        self._reconfigure(uuid + 1, handles)
        self.assertEqual(dist.get_world_size(), self.world_size - 1)
        self.assertEqual(dist.get_rank(), self.rank - (self.rank > killed_rank))
        self._assert_all_reduce_sum(sum(range(1, self.world_size)), DEVICE)

    def test_shrink_last_rank_killed(self, PARAMETER):
        self._shrink_to_survivors(1400, PARAMETER)

    def test_shrink_middle_rank_killed(self, PARAMETER):
        self._shrink_to_survivors(1500, PARAMETER)

    def test_shrink_first_rank_killed(self, PARAMETER):
        self._shrink_to_survivors(1600, PARAMETER)


'''
INSTANTIATED = """\
instantiate_device_type_tests(GlooKilledRankTest, globals(), only_for="cpu")


"""

# What differs in the newest form of the file: its helpers have a class without tests, and take a device, and PyTorch's
# linter wants a class of the CPU to be instantiated for it, which adds the device to the names of its tests.
BY_DEVICE = {
    "BASE": CLASS,
    "# classification\n": "hw_classification = HardwareClassification.CPU\n",
    "# device\n": "rank_device = self._rank_device(device)\n",
    "self._testMethodName]": 'self._testMethodName.removesuffix("_cpu")]',
    "PARAMETER": "device",
    "DEVICE": "rank_device",
}
BEFORE = {
    "BASE": "FaultToleranceTestBase",
    "# classification\n": 'device_type = "cpu"\n',
    "        # device\n": "",
    ", PARAMETER": "",
    ", DEVICE": "",
}


def edit(source):
    by_device = source.has(CLASS, r"def _rank_device\(")
    source.sub("", r"^import os\nimport sys\n", "import os\nimport signal\nimport sys\n")
    if by_device:
        source.sub("", r"^import time\n", "import time\nimport unittest\n")
    else:
        source.sub(CLASS, r"^    def test_reconfigure_basic\(", rf"\nclass {CLASS}(FaultToleranceTestBase):\n\g<0>")
        source.sub("", rf"^class {CLASS}:\n", "class FaultToleranceTestBase:\n")
    killed = KILLED + (INSTANTIATED if by_device else "")
    for name, value in (BY_DEVICE if by_device else BEFORE).items():
        killed = killed.replace(name, value)
    source.sub("", r"^class ReconfigureContractTest\b", lambda match: killed + match[0])
