"""--gpu-sharing: several units on one device, by the memory that their tests have needed. Off by default.

On real devices: the check `gpu-sharing` of benchmarks/gpu/run.
"""

import dataclasses
import json
import tempfile
import unittest
from pathlib import Path

from hypothesis import given, settings, strategies as st
from kit.invented import finished_test, make_test, make_unit
from kit.runs import RunsCase

from torch_testing_ext._machine.device_facts import DeviceFacts
from torch_testing_ext._machine.sharing import CONTEXT, DEVICE_MEMORY
from torch_testing_ext.runner.engine.again import Undisturbed
from torch_testing_ext.runner.model import Attempt, DeviceMemory, Lease, TestOutcome
from torch_testing_ext.runner.options.options import Options
from torch_testing_ext.runner.report import text
from torch_testing_ext.runner.scheduling.inventory import Inventory, environment_of, make_inventory
from torch_testing_ext.runner.scheduling.leases import MOST_ON_A_DEVICE, Leases
from torch_testing_ext.runner.scheduling.peak_memory import MARGIN, PeakMemory, memory_to_share
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.policy import Queue

GIB = 2**30


def unit_of(number, memory, devices=1):
    return dataclasses.replace(make_unit(number, devices=devices, seconds=1.0), memory=memory)


def leases_on(*gibs):
    names = tuple(map(str, range(len(gibs))))
    return Leases(names, 4, memory={name: gib * GIB for name, gib in zip(names, gibs, strict=True)})


class LeasesTest(unittest.TestCase):
    def test_small_units_fill_a_device(self):
        leases = leases_on(16, 16)
        first, second = leases.take(unit_of(1, 6 * GIB)), leases.take(unit_of(2, 6 * GIB))
        self.assertEqual((first.devices, second.devices), (("0",), ("0",)))
        self.assertEqual((first.memory, text.place(first)), (6 * GIB, "gpu 0: 6.0 GiB of it"))
        self.assertEqual(leases.take(unit_of(3, 6 * GIB)).devices, ("1",))
        self.assertFalse(leases.fits(unit_of(4, None)))
        self.assertTrue(leases.fits(unit_of(5, 4 * GIB)))
        self.assertFalse(leases.fits(unit_of(6, 11 * GIB)))
        leases.give_back(first)
        self.assertFalse(leases.fits(unit_of(4, None)))
        leases.give_back(second)
        self.assertEqual(leases.take(unit_of(4, None)).devices, ("0",))
        self.assertFalse(leases.fits(unit_of(7, 11 * GIB)))

    def test_a_whole_device_is_not_shared(self):
        leases = leases_on(16)
        leases.take(unit_of(1, None))
        self.assertFalse(leases.fits(unit_of(2, 1)))
        self.assertEqual(leases.free_devices, 0)

    def test_more_than_a_device_can_share(self):
        leases = leases_on(16)
        self.assertIsNone(leases.take(unit_of(1, 17 * GIB)).memory)
        self.assertFalse(leases.fits(unit_of(2, 1)))

    def test_not_too_many_on_one(self):
        leases = leases_on(16)
        for number in range(MOST_ON_A_DEVICE):
            leases.take(unit_of(number, 1))
        self.assertFalse(leases.fits(unit_of(9, 1)))

    def test_off_by_default(self):
        leases = Leases(("0",), 4)
        self.assertIsNone(leases.take(unit_of(1, 1)).memory)
        self.assertFalse(leases.fits(unit_of(2, 1)))

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from([None, 1, 3, 8, 20]), st.integers(1, 2)), min_size=1, max_size=12),
        st.randoms(use_true_random=False),
    )
    def test_all_units_run_and_no_device_is_overfull(self, wanted, random):
        leases = leases_on(8, 12)
        units = [unit_of(n, None if gib is None else gib * GIB, devices) for n, (gib, devices) in enumerate(wanted)]
        queue = Queue(units, 2, 4, may_run_now=leases.may_run_now, nodes=leases)
        running, done = [], 0
        while len(queue) or running:
            while (unit := queue.take(leases.free_devices, leases.free_slots)) is not None:
                running.append(leases.take(unit))  # which checks that no two leases overlap
            self.assertTrue(running, "nothing runs, and nothing fits")
            leases.give_back(running.pop(random.randrange(len(running))))
            done += 1
        self.assertEqual(done, len(units))
        self.assertEqual(leases.free_devices, 2)


class NeedsTest(unittest.TestCase):
    """What a test needs: learnt from earlier runs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.folder, self.warnings = Path(folder.name), []

    def memory(self):
        return PeakMemory(self.folder, self.warnings.append)

    def record(self, test, needed, outcome=TestOutcome.PASSED):
        one = finished_test(test, outcome)
        used = DeviceMemory(0, needed - CONTEXT, 1)
        attempt = dataclasses.replace(one.last, memory=used)
        self.memory().record([dataclasses.replace(one, attempts=(attempt,))])

    def test_larger_at_once_and_smaller_slowly(self):
        test = make_test("test_x", devices=1)
        self.assertIsNone(self.memory().expected(test))
        for needed, expected in ((4 * GIB, 4), (8 * GIB, 8), (4 * GIB, 6), (6 * GIB, 6)):
            self.record(test, needed)
            self.assertEqual(self.memory().expected(test), int(expected * GIB * MARGIN))
        self.assertEqual(self.warnings, [])

    def test_only_what_is_representative(self):
        test = make_test("test_x", devices=1)
        self.record(test, 4 * GIB, TestOutcome.FAILED)
        self.record(dataclasses.replace(test, shared_by=4), 4 * GIB)
        self.memory().record([finished_test(test)])
        self.assertIsNone(self.memory().expected(test))

    def test_bad_content_is_ignored(self):
        (self.folder / "memory.json").write_text(json.dumps({"format": "torch_testing_ext 1", "tests": {"a": -1}}))
        self.assertIsNone(self.memory().expected(make_test("test_x")))
        self.assertEqual(len(self.warnings), 1)

    def test_units(self):
        known = {"test_a": GIB, "test_b": 3 * GIB}
        tests = [
            make_test("test_a", devices=1, together="T"),
            make_test("test_b", devices=1, together="T"),
            make_test("test_c", devices=1),
        ]
        inventory = Inventory(("0",), fake=True)
        units = plan(tests, inventory, lambda test: None, memory=lambda test: known.get(test.id.method)).units
        self.assertEqual([unit.memory for unit in units], [3 * GIB, None])
        tests[0] = dataclasses.replace(tests[0], together="")
        units = plan(tests, inventory, lambda test: None, memory=lambda test: known.get(test.id.method)).units
        self.assertEqual([unit.memory for unit in units], [GIB, 3 * GIB, None])

    def test_what_devices_can_share(self):
        found = make_inventory(Options(), {}, "cuda", 1, facts=[DeviceFacts("H100", 80 * GIB)])
        self.assertEqual(memory_to_share(found), {"0": 72 * GIB})
        self.assertEqual(memory_to_share(make_inventory(Options(), {}, "cuda", 1)), {})
        lease = Lease(("0",), memory=GIB)
        self.assertEqual(environment_of(lease, found)[DEVICE_MEMORY], str(GIB))
        self.assertNotIn(DEVICE_MEMORY, environment_of(Lease(("0",)), found))


class OutOfMemoryTest(unittest.TestCase):
    def test_runs_again_with_a_whole_device(self):
        warnings = []
        undisturbed = Undisturbed(Leases(("0",), 1), warnings.append)
        test = make_test("test_x", devices=1)
        message = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
        alone = Attempt(test, TestOutcome.ERROR, message, lease=Lease(("0",)))
        shared = dataclasses.replace(alone, lease=Lease(("0",), memory=GIB))
        other = dataclasses.replace(shared, message="AssertionError: 1 != 2")
        self.assertFalse(undisturbed.wants_again(alone))
        self.assertFalse(undisturbed.wants_again(other))
        self.assertFalse(undisturbed.must_have_whole_devices([test], 0))
        self.assertTrue(undisturbed.wants_again(shared))
        self.assertTrue(undisturbed.must_have_whole_devices([test], 0))
        self.assertFalse(undisturbed.must_have_whole_devices([test], 1))
        self.assertFalse(undisturbed.wants_again(shared))
        self.assertEqual(len(warnings), 1)
        self.assertRegex(
            warnings[0], "test_x: it ran out of memory on a GPU that it shared; it runs again with a whole"
        )


TESTS = """
import os, time, unittest

class T(unittest.TestCase):
    def meet(self):
        # Passes only if both tests run at the same time.
        mine, other = ("a", "b") if self._testMethodName.endswith("a") else ("b", "a")
        open(mine, "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(other):
            self.assertLess(time.monotonic(), until, "the other test does not run")
            time.sleep(0.01)
        self.assertEqual(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"], "0")

    test_a = test_b = meet

    def test_lacks_memory(self):
        if "TORCH_TESTING_EXT_DEVICE_MEMORY" in os.environ:
            raise RuntimeError("CUDA out of memory")

for name in ("test_a", "test_b", "test_lacks_memory"):
    method = lambda self, name=name, method=getattr(T, name): method(self)
    method._min_gpus_required = 1
    setattr(T, name, method)
"""


class RunTest(RunsCase):
    def test_side_by_side_on_one_device(self):
        self.write("test/distributed/test_x.py", TESTS)
        argv = ("--fake-gpus=1", "--gpu-sharing", "--memory-per-test=2GiB", "-v", "--results=results.json")
        out = self.finish(self.start(*argv), 0)
        document = json.loads((self.root / "results.json").read_text())
        outcomes = {one["id"].rpartition("::")[2]: one["outcome"] for one in document["tests"]}
        self.assertEqual(outcomes, {"test_a": "passed", "test_b": "passed", "test_lacks_memory": "flaky"})
        self.assertIn("gpu 0: 2.0 GiB of it", out)
        self.assertIn("it runs again with a whole GPU", out)

    def test_bad_input(self):
        for argv, expected in (
            (["--memory-per-test=4GB"], "--memory-per-test needs --gpu-sharing"),
            (["--gpu-sharing", "--memory-per-test=4"], "'4' is not an amount of memory"),
            (["--gpu-sharing", "--cluster=auto"], "--cluster and --gpu-sharing cannot be combined"),
        ):
            self.finish(self.start(*argv), 4)
            self.assertIn(expected, self.stderr)
            self.assertEqual(len(self.stderr.strip().splitlines()), 1, self.stderr)


if __name__ == "__main__":
    unittest.main()
