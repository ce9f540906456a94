"""--ranks-per-gpu, and needs of devices: which tests run, on which devices, and what the reports say.

Everything here is decided before a device is touched. On real devices: the checks `suites-ranks-per-gpu` and `needs` of
benchmarks/gpu/run.
"""

import dataclasses
import unittest

from kit.files import subject
from kit.invented import make_test, make_unit
from kit.runs import RunsCase
from kit.with_accelerators import environ_of_accelerators

from torch_testing_ext._machine.device_needs import DeviceFacts, DeviceNeeds
from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU, ranks_per_device
from torch_testing_ext.runner.model import Lease
from torch_testing_ext.runner.options import Action, Options, UsageError
from torch_testing_ext.runner.options.sources import read_options
from torch_testing_ext.runner.report import wording
from torch_testing_ext.runner.run_site import notes_on_sharing
from torch_testing_ext.runner.scheduling.inventory import environment_of, make_inventory
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.unit_queue import Queue

GIB = 2**30
H100 = DeviceFacts("H100", 80 * GIB, (9, 0))
T4 = DeviceFacts("T4", 16 * GIB, (7, 5))


def inventory(*facts, ranks=1, kind="cuda", nccl=(2, 28, 9), **options):
    return make_inventory(Options(ranks_per_gpu=ranks, **options), {}, kind, len(facts), facts=facts, nccl=nccl)


def planned(test, found):
    return plan([test], found, lambda test: None)


class RanksPerGpuTest(unittest.TestCase):
    """Covered on a GPU by the check suites-ranks-per-gpu."""

    def test_only_a_test_that_needs_more_shares(self):
        found = inventory(H100, H100, ranks=4)
        for ranks, devices, shared_by in ((1, 1, 0), (2, 2, 0), (3, 2, 3), (8, 2, 8)):
            (unit,) = planned(make_test("test_x", devices=ranks, world_size=ranks), found).units
            self.assertEqual((unit.devices, unit.shared_by), (devices, shared_by))
        (skipped,) = planned(make_test("test_x", devices=9, world_size=9), found).skipped
        self.assertEqual(skipped.skip, "needs 9 devices, 2 available, for at most 8 ranks")

    def test_a_process_with_several_devices_cannot_share(self):
        (skipped,) = planned(make_test("test_x", devices=4, world_size=1), inventory(H100, ranks=4)).skipped
        self.assertEqual(skipped.skip, "needs 4 devices, 1 available, for 1 process")
        self.assertEqual(skipped.want, "4 devices")

    def test_ranks_on_one_device_have_no_connection(self):
        test = make_test("test_x", devices=2, world_size=2, of_devices=DeviceNeeds(nvlink=True))
        (skipped,) = planned(test, inventory(H100, ranks=4)).skipped
        self.assertRegex(skipped.skip, "^needs 2 devices, 1 available")

    def test_never_by_default(self):
        (skipped,) = planned(make_test("test_x", devices=4, world_size=4), inventory(H100)).skipped
        self.assertEqual(skipped.skip, "needs 4 devices, 1 available")

    def test_the_lease_says_how(self):
        found = inventory(H100, ranks=4)
        (unit,) = planned(make_test("test_x", devices=4, world_size=4), found).units
        leases = Leases(found.names, 4, facts=found.facts, shared_backend=found.shared_backend)
        lease = leases.take(unit)
        self.assertEqual(wording.place(lease), "gpu 0: 4 ranks on 1 GPU over gloo")
        self.assertEqual(environment_of(lease, found), {"CUDA_VISIBLE_DEVICES": "0", RANKS_PER_GPU: "4"})
        alone = Lease(("0",))
        self.assertEqual(environment_of(alone, found), {"CUDA_VISIBLE_DEVICES": "0", RANKS_PER_GPU: ""})
        self.assertEqual(ranks_per_device(environment_of(lease, found)), 4)
        self.assertEqual(ranks_per_device(environment_of(alone, found)), 1)
        self.assertEqual(environment_of(alone, inventory(H100)), {"CUDA_VISIBLE_DEVICES": "0"})

    def test_the_run_says_which_backend(self):
        over_gloo, over_nccl = inventory(H100, ranks=4), inventory(H100, ranks=4, nccl=(2, 30, 7))
        self.assertEqual((over_gloo.shared_backend, over_nccl.shared_backend), ("gloo", "nccl"))
        self.assertEqual(
            notes_on_sharing(over_gloo, (2, 28, 9)),
            [
                "4 ranks may share each GPU (--ranks-per-gpu): they use gloo, as NCCL 2.28.9 does not allow that; "
                "tests of NCCL itself are skipped"
            ],
        )
        self.assertRegex(notes_on_sharing(over_nccl, (2, 30, 7))[0], "NCCL 2.30.7 allows that as an experiment")
        self.assertEqual(notes_on_sharing(inventory(H100), (2, 30)), [])

    def test_more_ranks_than_memory_allows(self):
        with self.assertRaisesRegex(UsageError, r"^--ranks-per-gpu 30: 30 ranks .* device 1, .*: at most 19$"):
            inventory(H100, T4, ranks=30)
        self.assertEqual(inventory(H100, T4, ranks=19).most_ranks, 38)
        self.assertEqual(inventory(H100, T4, ranks=30, gpus=1).most_ranks, 30)

    def test_other_accelerators(self):
        own = make_inventory(Options(ranks_per_gpu=4), {}, "testacc", 1, backend="testccl")
        self.assertEqual(own.shared_backend, "testccl")
        note = "4 ranks may share each GPU (--ranks-per-gpu): they use testccl, which has to allow that"
        self.assertEqual(notes_on_sharing(own, ()), [note])
        with self.assertRaisesRegex(UsageError, "--ranks-per-gpu: gloo has no collectives for xpu devices"):
            make_inventory(Options(ranks_per_gpu=2), {}, "xpu", 1)
        self.assertEqual(make_inventory(Options(ranks_per_gpu=2), {}, None, 0).most_ranks, 0)


class NeedsOfDevicesTest(unittest.TestCase):
    """Covered on a GPU by the check needs."""

    def test_what_no_device_has_is_skipped_for_that_reason(self):
        test = make_test("test_x", devices=1, of_devices=DeviceNeeds(memory=20 * GIB, capability=(9, 0)))
        self.assertEqual(len(planned(test, inventory(T4, H100)).units), 1)
        (skipped,) = planned(test, inventory(T4)).skipped
        self.assertEqual(
            skipped.skip,
            "needs 1 device with 20.0 GiB of memory and compute capability 9.0: none of 1 devices, 1 needed (T4 has "
            "16.0 GiB and 7.5)",
        )
        self.assertEqual(skipped.want, "1 device with 20.0 GiB of memory and compute capability 9.0")
        (nothing_known,) = planned(test, make_inventory(Options(), {}, "cuda", 1)).skipped
        self.assertRegex(nothing_known.skip, "there is no device of which this is known")

    def test_the_lease_has_devices_that_suit(self):
        found = inventory(T4, H100, T4, H100)
        needy = make_unit(1, devices=1)
        needy = dataclasses.replace(
            needy, tests=(dataclasses.replace(needy.tests[0], of_devices=DeviceNeeds(memory=20 * GIB)),)
        )
        other = make_unit(2, devices=1)
        leases = Leases(found.names, 4, facts=found.facts)
        self.assertEqual(leases.take(needy).devices, ("1",))
        self.assertEqual(leases.take(other).devices, ("0",))
        first = leases.take(needy)
        self.assertEqual(first.devices, ("3",))
        self.assertFalse(leases.fits(needy))
        self.assertTrue(leases.fits(other))
        leases.give_back(first)
        self.assertTrue(leases.fits(needy))

    def test_a_unit_waits_for_devices_that_suit(self):
        found = inventory(T4, H100)
        needy = [make_unit(number, devices=1, seconds=5.0) for number in (1, 2)]
        needs = DeviceNeeds(memory=20 * GIB)
        needy = [
            dataclasses.replace(unit, tests=(dataclasses.replace(unit.tests[0], of_devices=needs),)) for unit in needy
        ]
        other = make_unit(3, devices=1, seconds=1.0)
        leases = Leases(found.names, 4, facts=found.facts)
        queue = Queue([*needy, other], leases)
        began = []
        while (unit := queue.take(leases.free_devices, leases.free_slots)) is not None:
            began.append((unit.number, leases.take(unit).devices))
        self.assertEqual(began, [(1, ("1",)), (3, ("0",))])

    def test_devices_of_a_plan_have_everything(self):
        options = Options(fake_accelerators=1, action=Action.DRY_RUN)
        test = make_test("test_x", devices=1, of_devices=DeviceNeeds(memory=20 * GIB, nvlink=True))
        self.assertEqual(len(planned(test, make_inventory(options, {}, None, 0)).units), 1)


TESTS = subject(__file__, "ranks_per_gpu.py")


class CommandLineTest(RunsCase):
    def setUp(self):
        super().setUp()
        self.write("test/distributed/test_x.py", TESTS)

    def test_planned_before_anything_runs(self):
        listed = self.finish(self.start("--list", "--ranks-per-gpu=4", environ=environ_of_accelerators(1)), 0)
        self.assertIn("test_four  4 ranks, 1 device, shared by 4 ranks", listed)
        self.assertIn("18.6 GiB of memory and compute capability 9.0", listed)

    def test_the_variable_means_the_same(self):
        for environ, expected in (({RANKS_PER_GPU: "4"}, 4), ({RANKS_PER_GPU: ""}, 1), ({}, 1)):
            self.assertEqual(read_options([], environ, self.root, self.root).options.ranks_per_gpu, expected)
        by_flag = read_options(["--ranks-per-gpu=2"], {RANKS_PER_GPU: "4"}, self.root, self.root)
        self.assertEqual(by_flag.options.ranks_per_gpu, 2)

    def test_bad_input(self):
        for argv, environ, expected in (
            (["--ranks-per-gpu", "0"], {}, "--ranks-per-gpu: '0' is not a whole number of at least 1"),
            (["--ranks-per-gpu", "x"], {}, "'x' is not a whole number"),
            ([], {RANKS_PER_GPU: "0"}, f"{RANKS_PER_GPU}: '0' is not a whole number of at least 1"),
            (["--ranks-per-gpu=2", "--cluster=auto"], {}, "--cluster and --ranks-per-gpu cannot be combined"),
        ):
            with self.subTest(argv=argv, environ=environ):
                self.finish(self.start(*argv, environ=environ), 4)
                self.assertIn(expected, self.stderr)
                self.assertEqual(len(self.stderr.strip().splitlines()), 1, self.stderr)


if __name__ == "__main__":
    unittest.main()
