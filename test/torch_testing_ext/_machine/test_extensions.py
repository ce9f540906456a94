"""An accelerator of another package, which torch knows by its API for extensions, works as CUDA does.

The accelerator is one of Python (`kit/python_accelerator`), which no line of ours knows.
"""

import contextlib
import os
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from kit.invented import make_unit
from kit.with_accelerators import KIND, MASK, have_accelerators, in_a_fork, use_own_leases, with_accelerators

from torch_testing_ext._machine import (
    accelerators,
    device_masks,
    device_questions,
    device_sharing,
    flags,
    random_state,
    visible_devices,
)
from torch_testing_ext._pytest_ranks.item_in_parent import need_of_devices
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.bases.continuous import MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import DistributedTestBase
from torch_testing_ext._testing.marks import distributed_needs, needs, needs_of_devices
from torch_testing_ext._testing.sharded import dtensor_devices
from torch_testing_ext._torch.devices import accelerator_state, cuda_state
from torch_testing_ext.launch.device_leases import variables_of
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.inventory import environment_of, make_inventory
from torch_testing_ext.runner.scheduling.leases import Leases

BACKEND = "testccl"


def use_devices():
    torch.get_device_module(KIND).init()


class TestCounting(unittest.TestCase):
    @with_accelerators()
    def test_counts_and_the_mask(self):
        for count in (0, 1, 2, 4, 8):
            with have_accelerators(count):
                self.assertEqual(accelerators.device_count(), count)
                self.assertEqual(accelerators.runtime(), KIND if count else None)
        with have_accelerators(4, **{MASK: "3,1"}):
            self.assertEqual(accelerators.device_count(), 2)
            self.assertEqual(accelerators.device_uuids(), ("testacc-3", "testacc-1"))
        self.assertFalse(accelerator_state.accelerator_is_initialised())

    @with_accelerators(2)
    def test_facts(self):
        (first, second) = accelerators.device_facts()
        self.assertEqual((first.name, first.memory, first.capability), ("Test accelerator", 16 << 30, (0, 0)))
        self.assertEqual(first, second)

    @with_accelerators(2)
    def test_facts_of_a_module_that_knows_none(self):
        with mock.patch.object(torch.get_device_module(KIND), "get_device_properties", side_effect=RuntimeError):
            self.assertEqual(
                device_questions.ask_facts()[0], {"name": "", "memory": 16 << 30, "capability": [0, 0], "peers": []}
            )

    @with_accelerators(3)
    def test_cuda_that_is_hidden_does_not_hide_them(self):
        with mock.patch.object(torch.version, "cuda", "13.0"), have_accelerators(3, CUDA_VISIBLE_DEVICES=""):
            self.assertEqual(accelerators.device_count(), 3)

    @with_accelerators(4)
    def test_flags(self):
        names = ("ACCELERATOR_TYPE", "TEST_MULTIACCELERATOR", "TEST_PRIVATEUSE1", "TEST_CUDA")
        flags.flag.cache_clear()
        self.assertEqual([flags.flag(name) for name in names], [KIND, True, True, False])


class TestForkSafety(unittest.TestCase):
    @with_accelerators(2)
    def test_the_line_that_used_it_is_named(self):
        self.assertIsNone(accelerators.unsafe_to_fork())
        use_devices()
        line = use_devices.__code__.co_firstlineno + 1
        self.assertEqual(accelerators.unsafe_to_fork(), f"{KIND} is initialised in {os.path.relpath(__file__)}:{line}")

    @with_accelerators(2)
    def test_a_use_that_was_not_seen(self):
        """The module's own function, not that of torch's module: as of a library in C++."""
        import python_accelerator

        python_accelerator.init()
        self.assertEqual(accelerators.unsafe_to_fork(), "an accelerator is initialised")

    @with_accelerators(2)
    def test_in_a_child_of_a_process_that_used_it(self):
        use_devices()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if accelerator_state.accelerator_is_in_bad_fork() else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertFalse(accelerator_state.accelerator_is_in_bad_fork())

    @with_accelerators(2)
    def test_random_state_of_a_device_in_use(self):
        use_devices()
        module = torch.get_device_module(KIND)
        state = torch.zeros(4, dtype=torch.uint8)
        with (
            mock.patch.object(module, "get_rng_state", lambda device: state, create=True),
            mock.patch.object(module, "set_rng_state", create=True) as put,
            random_state.freeze_rng_state(),
        ):
            pass
        put.assert_called_once_with(state, 0)

    @with_accelerators(2)
    def test_peak_memory(self):
        self.assertEqual(cuda_state.peak_memory(), {})
        use_devices()
        module = torch.get_device_module(KIND)
        with mock.patch.object(module, "max_memory_allocated", lambda number: 100 * number):
            self.assertEqual(cuda_state.peak_memory(), {1: (100, 0)})
        del module.max_memory_reserved
        self.assertEqual(cuda_state.peak_memory(), {})


class TestNeeds(unittest.TestCase):
    @with_accelerators()
    def test_decorators_of_devices(self):
        def skips(decorate):
            skip = needs.first_unmet(decorate(lambda self: None))
            return skip is not None

        for count in (0, 1, 2, 3, 4, 8):
            with have_accelerators(count):
                self.assertEqual(skips(distributed_needs.skip_if_lt_x_gpu(4)), count < 4, count)
                self.assertEqual(skips(needs_of_devices.requires_memory("12 GiB")), count == 0, count)
                self.assertEqual(skips(needs_of_devices.requires_memory("20 GiB")), True, count)

    @with_accelerators(2)
    def test_backends_by_what_torch_knows(self):
        for name in (BACKEND, f"cpu:gloo,{KIND}:{BACKEND}", "xccl", "hccl"):
            self.assertTrue(accelerators.need_accelerators(name), name)
        for name in ("gloo", "mpi", "fake", "unknown"):
            self.assertFalse(accelerators.need_accelerators(name), name)

    @with_accelerators(2)
    def test_bases(self):
        self.assertEqual(dtensor_devices.num_devices(), 2)
        self.assertEqual(dtensor_devices.device_type_for(2), KIND)
        self.assertEqual(dtensor_devices.device_type_for(4), "cpu")
        self.assertEqual(shared_devices.backend_of(KIND, 2), BACKEND)
        self.assertEqual(DistributedTestBase.backend(mock.Mock(world_size=2), f"{KIND}:1"), BACKEND)


class Persistent(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return BACKEND


class TestPersistentRanks(unittest.TestCase):
    """Covered on machines with two GPUs by the check `two-gpus`."""

    def selected(self, cls, rank):
        """The devices that a rank selects before it makes its group, which does not come about here."""
        chosen = []
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(torch.accelerator, "set_device_index", chosen.append),
            mock.patch.object(dist, "init_process_group", side_effect=lambda **_: chosen.append("group")),
            mock.patch.object(cls, "pg", None, create=True),
            tempfile.TemporaryDirectory() as folder,
        ):
            cls._init_pg(rank, 2, f"{folder}/store")
        return chosen

    @with_accelerators(2)
    def test_each_rank_has_its_own_device(self):
        """torch makes the group on the current device, which is the first one in all ranks unless one selects it."""
        self.assertEqual([self.selected(Persistent, rank) for rank in range(2)], [[0, "group"], [1, "group"]])

    @with_accelerators(2)
    def test_not_on_the_cpu(self):
        with mock.patch.object(Persistent, "backend_str", lambda: "gloo"):
            self.assertEqual(self.selected(Persistent, 1), ["group"])


class TestSharing(unittest.TestCase):
    """Ranks that share devices. Covered on a GPU by the check `suites-ranks-per-gpu`."""

    @with_accelerators(2, **{device_sharing.RANKS_PER_GPU: "2"})
    def test_a_rank_names_a_device_by_its_own_number(self):
        selected = []
        with (
            mock.patch.object(torch.accelerator, "set_device_index", selected.append),
            mock.patch.object(torch.get_device_module(KIND), "set_device", selected.append, create=True),
        ):
            shared_devices.prepare_shared_devices(3, 4)
            torch.accelerator.set_device_index(3)
            torch.get_device_module(KIND).set_device(torch.device(KIND, 2))
            shared_devices.prepare_shared_devices(3, 4)
            torch.accelerator.set_device_index(1)
        self.assertEqual(selected, [1, 0, 1])
        self.assertEqual(shared_devices.backend_of(KIND, 4), BACKEND)
        self.assertEqual((distributed_needs.at_least_x_gpu(4), distributed_needs.at_least_x_gpu(5)), (True, False))

    @in_a_fork
    def test_contexts_and_tensors_take_the_number_of_a_rank(self):
        """As `with torch.cuda.device(self.rank)` and `.cuda(self.rank)` in most of PyTorch's tests for several GPUs."""
        with mock.patch.object(
            torch.Tensor, "cuda", lambda tensor, device=None: tensor + (0 if device is None else device)
        ):
            cuda_state.fold_device_numbers(2, "cuda")
            contexts = [torch.cuda.device(name) for name in (3, "cuda:2", torch.device("cuda", 5), -1)]
            self.assertEqual([context.idx for context in contexts], [1, 0, 1, -1])
            indices = [torch.accelerator.device_index(number) for number in (3, None)]
            self.assertEqual([context.idx for context in indices], [1, None])
            zero = torch.zeros(())
            moved = [zero.cuda(3), zero.cuda(device=2), zero.cuda(torch.device("cuda", 1)), zero.cuda()]
            self.assertEqual([int(tensor) for tensor in moved], [1, 0, 1, 0])
            linear = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(linear.weight)
            self.assertEqual(linear.cuda(5).weight.item(), 1)


class TestMasks(unittest.TestCase):
    """Masks by kind. Covered on a GPU by the check `masks`."""

    def test_names_and_masks(self):
        for kind, mask, count, names in (
            ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}, 2, ("4", "6")),
            ("neuron", {"NEURON_RT_VISIBLE_CORES": "0-2,7"}, 4, ("0", "1", "2", "7")),
            ("hpu", {"HABANA_VISIBLE_MODULES": "1"}, 1, ("1",)),
            ("other", {"OTHER_VISIBLE_DEVICES": "2,0"}, 2, ("2", "0")),
            ("other", {"CUDA_VISIBLE_DEVICES": "2,0"}, 2, ("0", "1")),
        ):
            with self.subTest(kind=kind, mask=mask):
                self.assertEqual(visible_devices.visible_names(mask, kind, count), names)
                expected = dict.fromkeys(device_masks.masks_of(kind), names[-1])
                self.assertEqual(visible_devices.masks_for(names[-1:], kind), expected)
        self.assertEqual(visible_devices.masks_for((), None), {})

    def test_a_mask_that_names_a_device_that_is_not_there(self):
        for kind, environ in (
            ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0,9"}),
            ("neuron", {"NEURON_RT_VISIBLE_CORES": "8-9"}),
            ("other", {"OTHER_VISIBLE_DEVICES": "0,9"}),
        ):
            problem = visible_devices.problem_of_mask(environ, kind, 1)
            self.assertEqual(problem, "{}={} names a device that is not there: 9".format(*next(iter(environ.items()))))

    @with_accelerators(4)
    def test_an_answer_holds_for_the_masks_of_the_table(self):
        """One table says what is a mask. The driver is asked again when one of them changes, and for nothing else."""
        with have_accelerators(4, **{MASK: "0,1,2,3", "NVIDIA_VISIBLE_DEVICES": "all"}):
            self.assertEqual(accelerators.device_count(), 4)
            for mask in sorted(device_masks.all_masks()):
                with mock.patch.dict(os.environ, {mask: "0"}), mock.patch.object(accelerators, "answer_to") as ask:
                    ask.return_value = (KIND, 1)
                    self.assertEqual((accelerators.device_count(), ask.call_count), (1, 1), mask)
            for other in ("VISIBLE", "GOMP_CPU_AFFINITY", "NVIDIA_VISIBLE_DEVICES"):
                with mock.patch.dict(os.environ, {other: "0"}):
                    self.assertEqual(accelerators.device_count(), 4)


class TestLeases(unittest.TestCase):
    """Leases of a run. Covered on a GPU by the check `masks`."""

    def test_a_lease_confines_a_unit(self):
        inventory = make_inventory(Options(), {}, KIND, 4, [f"testacc-{number}" for number in range(4)])
        leases = Leases(inventory.names, 4)
        masks = [environment_of(leases.take(make_unit(at, devices=2)), inventory)[MASK] for at in range(2)]
        self.assertEqual(masks, ["0,1", "2,3"])


class TestLeasesOfPytest(unittest.TestCase):
    """Leases of tests with the mark `world_size`. Covered on a GPU by no check."""

    def lease(self, stack, ranks):
        return stack.enter_context(variables_of(need_of_devices(mock.Mock(), "test_x.py::test_it", ranks)))

    def setUp(self):
        use_own_leases(self)

    @with_accelerators(4)
    def test_two_tests_at_once(self):
        with contextlib.ExitStack() as stack:
            masks = [self.lease(stack, 2)[MASK] for _ in range(2)]
        self.assertEqual(masks, ["0,1", "2,3"])


if __name__ == "__main__":
    unittest.main()
