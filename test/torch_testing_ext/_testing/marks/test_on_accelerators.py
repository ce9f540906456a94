"""What decorators and functions of tests say on machines with accelerators of an extension, in whatever number.

The accelerators are those of Python (`kit/python_accelerator`): no compiler is needed.
"""

import contextlib
import os
import queue
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from kit.with_accelerators import KIND, MASK, have_accelerators, use_own_leases, with_accelerators

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators, asked_devices, device_sharing, flags, random_state, visible_devices
from torch_testing_ext._machine.device_locks import LEASE_FOLDER, LEASED, DeviceLocks
from torch_testing_ext._machine.machine_memory import MachineMemory, MemoryUse
from torch_testing_ext._testing.bases import scripts, spawned_functions, torchrun_scripts
from torch_testing_ext._testing.bases.spawned_functions import need_of_devices
from torch_testing_ext._testing.marks import (
    backend_needs,
    collective_platforms,
    device_cycles,
    device_types,
    distributed_needs,
    dtypes_of_tests,
    failures_by_architecture,
    needs,
    needs_of_devices,
    only_on_devices,
    settings_of_tests,
    skips,
    skips_at_definition,
    skips_at_run,
    skips_by_architecture,
    skips_by_device_type,
)
from torch_testing_ext.launch import device_leases as leases
from torch_testing_ext.launch.attempts import RanksEnd
from torch_testing_ext.ranks import run_script, spawn

BACKEND = "testccl"
MACHINES = (0, 1, 2, 4)


def skip_of(decorate):
    """Why a test with this decorator would skip now; empty if it would run."""
    skip = needs.first_unmet(decorate(lambda self: None))
    return "" if skip is None else skip.message


def on_machines(decorate):
    """The same on each machine."""
    reasons = []
    for count in MACHINES:
        with have_accelerators(count):
            reasons.append(skip_of(decorate))
    return reasons


def _nothing(self):
    pass


def _raised(decorate, **attributes):
    """Why a test skips when it is called, or is marked as one to skip."""
    test = decorate(lambda self: None)
    if getattr(test, "__unittest_skip__", False):
        return test.__unittest_skip_why__
    try:
        test(SimpleNamespace(**attributes))
    except unittest.SkipTest as skip:
        return str(skip)
    return ""


class TestNumbers(unittest.TestCase):
    """Decorators that want a number of devices."""

    @with_accelerators()
    def test_on_the_cpu_without_any(self):
        reasons = on_machines(distributed_needs.skip_if_lt_x_gpu(2, allow_cpu=True))
        self.assertEqual([bool(reason) for reason in reasons], [False, True, False, False])

    @with_accelerators(WORLD_SIZE="2")
    def test_as_many_as_ranks(self):
        none, few, *enough = on_machines(distributed_needs.skip_if_no_gpu)
        self.assertEqual(none, "No accelerator is available")
        self.assertEqual((few, enough), ("Need at least 2 accelerator devices", ["", ""]))

    @with_accelerators()
    def test_only_for_nccl(self):
        self.assertEqual(
            on_machines(distributed_needs.nccl_skip_if_lt_x_gpu("nccl", 4))[2:],
            ["Need at least 4 accelerator devices", ""],
        )
        self.assertIs(distributed_needs.nccl_skip_if_lt_x_gpu(BACKEND, 4)(_nothing), _nothing)

    @with_accelerators(2)
    def test_world_size(self):
        self.assertEqual(skip_of(distributed_needs.requires_world_size(4)), "requires 4 accelerators, found 2")
        self.assertEqual(skip_of(distributed_needs.requires_world_size(2)), "")

    @with_accelerators()
    def test_at_least(self):
        found = []
        for count in MACHINES:
            with have_accelerators(count):
                found.append([distributed_needs.at_least_x_gpu(0), distributed_needs.at_least_x_gpu(2)])
        self.assertEqual(found, [[False, False], [True, False], [True, True], [True, True]])

    @with_accelerators(2, **{device_sharing.RANKS_PER_GPU: "2"})
    def test_shared(self):
        self.assertEqual(accelerators.most_ranks(), 4)
        self.assertEqual([accelerators.ranks_for(needed) for needed in (1, 3, 4, 9)], [2, 3, 4, 4])
        self.assertEqual(skip_of(distributed_needs.skip_if_lt_x_gpu(4)), "")
        self.assertIn("5", skip_of(distributed_needs.skip_if_lt_x_gpu(5)))

    @with_accelerators()
    def test_any(self):
        found = []
        for count in MACHINES:
            with have_accelerators(count):
                flags.flag.cache_clear()
                found.append(_raised(skips_at_run.requires_accelerator))
        self.assertEqual(found, ["requires accelerator", "", "", ""])
        self.assertEqual(needs.most_needed([skips_at_run.requires_accelerator(lambda self: None)]), 1)

    @with_accelerators(4, **{MASK: "1,2"})
    def test_those_that_a_mask_shows(self):
        self.assertEqual(skip_of(distributed_needs.skip_if_lt_x_gpu(2)), "")
        self.assertEqual(skip_of(distributed_needs.skip_if_lt_x_gpu(3)), "Need at least 3 accelerator devices")


class TestFacts(unittest.TestCase):
    """Decorators that want devices of some kind, and functions that say what is known of them."""

    @with_accelerators()
    def test_peers(self):
        none, one, *several = on_machines(needs_of_devices.requires_peer_access())
        self.assertEqual((none, one), ("No accelerator is available", "Need at least 2 accelerator devices"))
        for reason in several:
            self.assertIn("they cannot read each other's memory", reason)
        with have_accelerators(2):
            self.assertFalse(accelerators.peers_have_access())

    @with_accelerators(2)
    def test_nvlink(self):
        self.assertIn("NVML does not say which devices NVLink connects", skip_of(needs_of_devices.requires_nvlink()))

    @with_accelerators(2)
    def test_compute_capability(self):
        self.assertIn("none of 2 devices, 2 needed (Test accelerator has", skip_of(needs_of_devices.requires_sm(9)))

    @with_accelerators(2)
    def test_nothing_of_cuda(self):
        self.assertEqual(accelerators.cuda_properties(), {})
        self.assertEqual((accelerators.why_no_device(), accelerators.xpu_device_id()), ("", 0))
        self.assertFalse(collective_platforms.evaluate_platform_supports_symm_mem())
        self.assertTrue(collective_platforms.sm_is_or_higher_than(torch.device(KIND, 1), 9, 0))
        for decorate in (
            skips_by_architecture.requires_cuda_p2p_access(),
            collective_platforms.requires_multicast_support(),
        ):
            self.assertIn("not available", _raised(decorate))

    @with_accelerators()
    def test_why_there_is_none(self):
        with mock.patch.multiple(torch.version, cuda=None, hip=None):
            self.assertEqual((accelerators.why_no_device(), accelerators.device_uuids()), ("", ()))
        self.assertEqual(accelerators.device_facts(), ())

    @with_accelerators(2)
    def test_a_module_that_knows_no_uuids(self):
        with mock.patch.object(torch.get_device_module(KIND), "get_device_properties", side_effect=RuntimeError):
            self.assertEqual(accelerators.device_uuids(), ())

    @with_accelerators(3)
    def test_asked_where_they_are_in_use(self):
        """A fork could not ask any more: this process does."""
        torch.get_device_module(KIND).init()
        self.assertEqual(asked_devices.answer_to("ask_devices"), (KIND, 3))


class TestBackends(unittest.TestCase):
    @with_accelerators()
    @mock.patch("torch.distributed.is_backend_available", lambda name: False)
    def test_an_extension_has_one_of_its_own(self):
        """Where torch is not built with NCCL."""
        for count in MACHINES:
            with have_accelerators(count):
                reason = _raised(backend_needs.requires_accelerator_dist_backend())
                self.assertEqual(bool(reason), count == 0, reason)
        with have_accelerators(2):
            self.assertIn("among ['xccl']", _raised(backend_needs.requires_accelerator_dist_backend(["xccl"])))

    @with_accelerators(2)
    def test_a_version_of_nccl_is_of_no_account(self):
        self.assertIs(backend_needs.requires_nccl_version((99, 0), "so")(_nothing), _nothing)

    @with_accelerators(2)
    def test_devices_that_follow_from_a_backend(self):
        for backend, expected in ((BACKEND, 4), ("gloo", None), (None, "auto")):
            self.assertEqual(settings_of_tests.devices_for(None, 4, backend, "auto"), expected, backend)
        self.assertEqual(settings_of_tests.devices_for(0, 4, BACKEND, "auto"), 0)


class TestRanks(unittest.TestCase):
    """Devices of the ranks of `spawn` and `run_script`."""

    def setUp(self):
        use_own_leases(self)

    def masks(self, *arguments):
        with leases.variables_of(need_of_devices(*arguments)) as environ:
            return environ.get(MASK), environ.get(LEASED, "").count(KIND) // 2

    @with_accelerators(2)
    def test_masks(self):
        for devices, world_size, expected in (
            ("auto", 2, (None, 2)),
            ("auto", 3, (visible_devices.NONE, 0)),
            (0, 2, (visible_devices.NONE, 0)),
            (1, 2, ("0", 1)),
            (2, 2, (None, 2)),
            (None, 2, (None, 2)),
        ):
            self.assertEqual(self.masks(devices, world_size), expected, (devices, world_size))
        with self.assertRaises(needs.Skipped):
            self.masks(4, 4)

    @with_accelerators(2)
    def test_a_backend_decides(self):
        self.assertEqual(self.masks(None, 2, BACKEND), (None, 2))
        with self.assertRaises(needs.Skipped):
            self.masks(None, 4, BACKEND)
        self.assertEqual(self.masks(None, 4, "gloo"), (None, 0))

    @with_accelerators()
    def test_without_any(self):
        self.assertEqual(self.masks("auto", 2), (None, 0))

    def locks(self, count):
        """Those of another program."""
        identities = {str(number): f"{KIND}-{KIND}-{number}" for number in range(count)}
        locks = DeviceLocks(Path(os.environ[LEASE_FOLDER]), identities, "pid 1: another program")
        return locks

    @with_accelerators(4)
    def test_no_other_program_has_the_same_while_they_run(self):
        other = self.locks(4)
        other.acquire("0")
        with self.unstarted(spawned_functions._SpawnedRanks, self.check_lease):
            spawn(_nothing, 2, devices=2)
        for launcher, host in ((None, scripts._ScriptRanks), ("torchrun", torchrun_scripts.TorchrunRanks)):
            seen = {}
            with self.unstarted(host, seen.update):
                run_script(__file__, world_size=1, devices=1, launcher=launcher)
            self.assertEqual((seen[MASK], seen[LEASED]), ("1", f"{KIND}-{KIND}-1"))
        self.assertEqual([name for name in "0123" if other.acquire(name)], ["0", "1", "2", "3"])
        other.close()

    @contextlib.contextmanager
    def unstarted(self, ranks, look):
        """Let such ranks pass without a start; `look` gets the variables that they would have."""
        looked = mock.Mock()

        def start(_, attempt):
            attempt.equip()
            look(attempt.environ)
            looked()

        passes = RanksEnd((), launch.Verdict(launch.TestOutcome.PASSED))
        with mock.patch.multiple(ranks, start=start, judge=lambda *_: passes):
            yield
        looked.assert_called_once()
        # No fork server removes the folder of this process.
        launch.close()

    def check_lease(self, environ):
        """What is passed to ranks that lease 1 and 2."""
        identities = [f"{KIND}-{KIND}-{number}" for number in (1, 2)]
        self.assertEqual((environ[MASK], environ[LEASED]), ("1,2", ",".join(identities)))
        others = self.locks(4)
        self.assertEqual([name for name in "123" if others.acquire(name)], ["3"])
        others.close()

    @contextlib.contextmanager
    def told_at_once(self):
        """Whoever waits for devices soon tells so, to this queue. Threads that lease may be started meanwhile."""
        # Beside another thread, only a new interpreter could tell.
        self.assertTrue(accelerators.device_uuids())
        told = queue.Queue()
        with (
            mock.patch.object(leases, "_RESERVE_AFTER", 0.0),
            mock.patch.object(leases.notes, "warn_user", told.put),
        ):
            yield told

    @with_accelerators(2)
    def test_another_thread_waits_and_the_user_is_told_for_whom(self):
        got = queue.Queue()

        def wait():
            with leases.variables_of(need_of_devices(1, 1, None, "the waiting one")) as environ:
                got.put(environ[LEASED])

        thread = threading.Thread(target=wait, daemon=True)
        with self.told_at_once() as told:
            with leases.variables_of(need_of_devices(2, 2, None, "this test")):
                thread.start()
                text = told.get(timeout=60)
                self.assertTrue(got.empty())
            self.assertEqual(got.get(timeout=60), f"{KIND}-{KIND}-0")
            thread.join()
        self.assertEqual(text, f"waiting for 1 of 2 devices, used by pid {os.getpid()}: this test")

    @with_accelerators(3)
    def test_a_thread_does_not_wait_for_itself(self):
        """Ranks that tests of a class share have devices while none of them runs. Free ones come first."""
        with leases.variables_of(need_of_devices(2, 2)) as outer:
            self.assertEqual(outer[MASK], "0,1")
            for count, mask in ((1, "2"), (2, "2,0"), (3, None)):
                with leases.variables_of(need_of_devices(count, count)) as inner:
                    self.assertEqual(inner.get(MASK), mask)
            self.assertFalse(self.locks(3).acquire("0"))

    @with_accelerators(4)
    def test_two_that_have_some_do_not_wait_for_each_other(self):
        """As when ranks that are shared in two workers have two each, and a test beside them wants all four."""
        self.assertEqual(len(accelerators.device_uuids()), 4)
        both_have_some = threading.Barrier(2)
        got = queue.Queue()

        def lease_twice():
            with leases.variables_of(need_of_devices(2, 2)):
                both_have_some.wait(60)
                with leases.variables_of(need_of_devices(4, 4)) as environ:
                    got.put(environ[LEASED])

        threads = [threading.Thread(target=lease_twice, daemon=True) for _ in range(2)]
        with self.told_at_once() as told:
            for thread in threads:
                thread.start()
            self.assertEqual(got.get(timeout=60), got.get(timeout=60))
            for thread in threads:
                thread.join(60)
        texts = [told.get() for _ in range(told.qsize())]
        self.assertEqual(texts.count("sharing 4 of 4 devices with tests that wait for this one"), 1, texts)
        others = self.locks(4)
        self.assertEqual([name for name in "0123" if others.acquire(name)], ["0", "1", "2", "3"])
        others.close()


class TestOtherMachines(unittest.TestCase):
    """Decorators on machines that are not here, as flags and versions describe them."""

    ASKING = (
        failures_by_architecture,
        only_on_devices,
        skips,
        skips_at_definition,
        skips_at_run,
        skips_by_architecture,
        skips_by_device_type,
    )

    def is_skipped(self, decorator, *true, version=None, **attributes):
        """`decorator()` makes the decorator there. `true`: the flags that are."""
        with contextlib.ExitStack() as stack:
            for module in self.ASKING:
                stack.enter_context(mock.patch.object(module, "flag", true.__contains__))
            stack.enter_context(mock.patch.multiple(torch.version, **(version or {"xpu": None})))
            return bool(_raised(decorator(), **attributes))

    def test_flags(self):
        for decorator, true, expected in (
            (lambda: skips_at_definition.requires_multigpu, (), True),
            (lambda: skips_at_definition.requires_multigpu, ("TEST_MULTIGPU",), False),
            (lambda: skips_at_run.skipRocmIfTorchInductor(), ("TEST_WITH_ROCM",), False),
            (lambda: skips_at_run.skipRocmIfTorchInductor(), ("TEST_WITH_ROCM", "TEST_WITH_TORCHINDUCTOR"), True),
            (lambda: skips_by_architecture.skipIfWindowsXPU, ("TEST_XPU",), False),
            (lambda: skips_by_architecture.skipIfWindowsXPU, ("TEST_XPU", "IS_WINDOWS"), True),
        ):
            with self.subTest(true=true):
                self.assertEqual(self.is_skipped(decorator, *true), expected)

    def test_versions_of_rocm(self):
        with mock.patch.object(skips_by_architecture, "getRocmVersion", lambda: (6, 4)):
            for decorator, expected in (
                (lambda: skips_by_architecture.skipIfRocmVersionLessThan((7, 0)), True),
                (lambda: skips_by_architecture.skipIfRocmVersionAtLeast((6, 4)), True),
                (lambda: skips_by_architecture.skipIfRocmVersionAtLeast((6, 5)), False),
                (lambda: skips_by_architecture.skipIfRocmVersionInRange((6, 0), (6, 4), "why"), False),
                (lambda: skips_by_architecture.skipIfRocmVersionInRange((6, 0), (6, 5), "why"), True),
            ):
                self.assertEqual(self.is_skipped(decorator, "TEST_WITH_ROCM"), expected)
                self.assertFalse(self.is_skipped(decorator))

    def test_versions_of_cuda(self):
        for version, hip, expected in (("12.4", None, True), ("12.8", None, False), ("12.4", "6.4", False)):
            found = {"cuda": version, "hip": hip, "xpu": None}
            self.assertEqual(
                self.is_skipped(lambda: failures_by_architecture.requires_triton_ptxas_compat, version=found), expected
            )

    def test_the_allocator_of_cuda(self):
        for is_enabled in (True, False):
            with mock.patch.object(
                skips_at_run.cuda_state, "caching_allocator_is_enabled", lambda is_on=is_enabled: is_on
            ):
                skipped = self.is_skipped(lambda: skips_at_run.skipIfCachingAllocatorDisabled, "TEST_CUDA")
            self.assertEqual(skipped, not is_enabled)

    def test_of_one_kind(self):
        for kind, true, expected in (("cuda", ("TEST_WITH_ROCM",), True), ("cuda", (), False), ("xpu", (), False)):
            self.assertEqual(
                self.is_skipped(lambda: skips_by_device_type.skipCUDAIfRocm, *true, device_type=kind), expected
            )
        self.assertTrue(self.is_skipped(lambda: only_on_devices.onlyPRIVATEUSE1, device_type="cuda"))

    def test_memory_of_a_device_without_any(self):
        self.assertFalse(only_on_devices._has_device_memory(torch.device("cuda"), 1))

    def test_a_stream_is_kept_busy(self):
        with mock.patch.object(torch.cuda, "_sleep") as sleep:
            device_cycles.device_sleep("cuda", 100)
        sleep.assert_called_once_with(100)


class TestDeviceTypes(unittest.TestCase):
    @with_accelerators(2)
    def test_names(self):
        self.assertIn(KIND, device_types.native_devices())
        self.assertEqual(dtypes_of_tests.dtypesIfPRIVATEUSE1(torch.float).device_type, KIND)

    @with_accelerators(2)
    def test_decorators_that_choose_devices(self):
        for decorate, runs_on_cpu, runs_on_it in (
            (only_on_devices.onlyAccelerator, False, True),
            (only_on_devices.onlyCUDAAndPRIVATEUSE1, False, True),
            (only_on_devices.onlyPRIVATEUSE1, False, True),
            (only_on_devices.onlyCUDA, False, False),
            (only_on_devices.onlyNativeDeviceTypes, True, True),
            (skips_by_device_type.skipPRIVATEUSE1, True, False),
        ):
            for kind, runs in (("cpu", runs_on_cpu), (KIND, runs_on_it)):
                with self.subTest(decorate=getattr(decorate, "__name__", decorate), kind=kind):
                    self.assertEqual(_raised(decorate, device_type=kind) == "", runs)

    @with_accelerators(2)
    def test_large_tensors(self):
        """There are 16 GiB."""
        with mock.patch.object(torch.accelerator, "empty_cache"):
            for size, reason in (("12GB", ""), ("20GB", f"Insufficient {KIND}:1 memory")):
                decorate = only_on_devices.largeTensorTest(size)
                self.assertEqual(_raised(decorate, get_primary_device=lambda: f"{KIND}:1"), reason)

    @with_accelerators()
    def test_large_tensors_without_any(self):
        decorate = only_on_devices.largeTensorTest("1GB", device=KIND)
        self.assertEqual(_raised(decorate), f"Insufficient {KIND} memory")

    def test_large_tensors_on_the_cpu(self):
        """What the machine uses already is not free."""
        use = MemoryUse(used=6 << 30, limit=16 << 30)
        with mock.patch.object(MachineMemory, "of_machine", lambda self: use):
            for size, reason in (("9GB", ""), ("11GB", "Insufficient cpu memory")):
                self.assertEqual(_raised(only_on_devices.largeTensorTest(size, device="cpu")), reason)


class TestStreams(unittest.TestCase):
    @with_accelerators(1)
    def test_cycles(self):
        slept = []

        class Event(SimpleNamespace):
            def record(self):
                self.at = sum(slept)

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) / 1000

        module = torch.get_device_module(KIND)
        with (
            mock.patch.object(module, "_sleep", slept.append, create=True),
            mock.patch.object(module, "Event", Event, create=True),
        ):
            self.assertEqual(device_cycles.get_cycles_per_ms(KIND), 1000)
        self.assertEqual(slept, [device_cycles.CYCLES] * 10)


class TestSeeds(unittest.TestCase):
    @with_accelerators(2)
    def test_devices_are_seeded_and_not_used(self):
        with mock.patch.object(torch.get_device_module(KIND), "manual_seed_all") as seed:
            random_state.set_rng_seed(7)
        seed.assert_called_once_with(7)
        self.assertIsNone(accelerators.unsafe_to_fork())


if __name__ == "__main__":
    unittest.main()
