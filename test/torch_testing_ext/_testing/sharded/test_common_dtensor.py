"""The base, `with_comms`, the placements converter, and the cost of importing them."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.ranks import stays_true, wait_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.bases import group_creation
from torch_testing_ext.common_distributed import needs_of
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor import common_dtensor
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorConverter,
    DTensorTestBase,
    skip_unless_torch_gpu,
    with_comms,
)


@contextmanager
def devices(count: int, kind: str | None) -> Iterator[None]:
    """Simulate a machine with these accelerators."""
    with (
        mock.patch.object(accelerators, "device_count", lambda: count),
        mock.patch.object(accelerators, "accelerator_type", lambda: kind),
    ):
        yield


class NoRanks(DTensorTestBase):
    """A test case whose settings are read and that starts no ranks."""

    def runTest(self) -> None: ...


class FourRanks(NoRanks):
    world_size = 4  # type: ignore[assignment]


class SettingsTest(TestCase):
    @parametrize(
        "count, kind, num_devices, device_type",
        [
            (0, None, 4, "cpu"),
            (1, "cuda", 4, "cpu"),
            (2, "cuda", 2, "cuda"),
            (3, "xpu", 3, "xpu"),
            (8, "cuda", 4, "cuda"),
        ],
        name_fn=lambda count, kind, *_: f"{count}_{kind}",
    )
    def test_settings_by_devices(self, count: int, kind: str | None, num_devices: int, device_type: str) -> None:
        with devices(count, kind):
            test = NoRanks()
            self.assertEqual(common_dtensor.DEVICE_COUNT, count)
            self.assertEqual(common_dtensor.DEVICE_TYPE, kind or "cpu")
            self.assertEqual(common_dtensor.NUM_DEVICES, num_devices)
            self.assertEqual(test.world_size, num_devices)
            self.assertEqual(test.device_type, device_type)
            self.assertEqual(test.backend, {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}[device_type])
            self.assertFalse(test.is_local_tensor_enabled)

    def test_pg_backend_is_the_accelerators(self) -> None:
        with devices(1, "cuda"):
            self.assertEqual(common_dtensor.PG_BACKEND, "nccl")
        with devices(0, None):
            self.assertEqual(common_dtensor.PG_BACKEND, "gloo")

    def test_fewer_devices_than_ranks(self) -> None:
        with devices(2, "cuda"):
            test = FourRanks()
            self.assertEqual((test.device_type, test.backend), ("cpu", "gloo"))

    def test_skip_unless_torch_gpu_needs_num_devices(self) -> None:
        with devices(2, "cuda"):
            (need,) = needs_of(skip_unless_torch_gpu(lambda self: None))
            self.assertEqual((need.devices, need.allow_cpu), (2, False))
            self.assertIsNone(need.unmet())
        with devices(1, "cuda"):
            self.assertIsNotNone(need.unmet())

    def test_accelerator_backend_without_devices_is_a_skip(self) -> None:
        with devices(1, "cuda"), self.assertRaisesRegex(unittest.SkipTest, "at least 4"):
            FourRanks().init_pg(False, "cpu:gloo,cuda:nccl")

    def test_unknown_backend(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "Backend carrier-pigeon not supported! .*gloo.*nccl"):
            FourRanks().init_pg(False, "carrier-pigeon")

    def test_with_comms_does_nothing_without_init_pg(self) -> None:
        self.assertEqual(with_comms(lambda self: seen.append(self))(seen := []), None)
        self.assertEqual(len(seen), 1)

    def test_unknown_name(self) -> None:
        with self.assertRaisesRegex(AttributeError, "common_dtensor.*'NoSuchModel'"):
            common_dtensor.NoSuchModel  # noqa: B018

    def test_all_names_exist(self) -> None:
        self.assertLessEqual(set(common_dtensor.__all__), set(dir(common_dtensor)))
        for name in common_dtensor.__all__:
            getattr(common_dtensor, name)

    @pytest.mark.slow
    def test_importing_is_cheap_and_touches_no_device(self) -> None:
        program = (
            "import sys, torch\n"
            "from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule, NUM_DEVICES\n"
            "assert not torch.cuda.is_initialized()\n"
            "print([name for name in ('torch.distributed.tensor', 'torch._dynamo') if name in sys.modules])"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(ended.stdout.strip(), "[]")


class InRanksTest(DTensorTestBase):
    @with_comms
    def test_group_exists(self) -> None:
        self.assertEqual((dist.get_world_size(), dist.get_rank()), (self.world_size, self.rank))
        self.assertEqual(dist.get_backend(), self.backend)
        mesh = self.build_device_mesh()
        self.assertEqual((mesh.shape, mesh.device_type), ((self.world_size,), self.device_type))
        self.init_manual_seed_for_rank()
        self.assertEqual(torch.initial_seed(), self.rank)

    @with_comms(eager_init=True)
    def test_eager_init(self) -> None:
        self.assertTrue(dist.is_initialized())

    @with_comms(backend="fake")
    def test_other_backend(self) -> None:
        self.assertEqual(dist.get_backend(), "fake")

    @with_comms
    def test_run_subtests(self) -> None:
        seen: list[tuple[int, str]] = []
        self.run_subtests({"a": [1, 2], "b": ["x", "y"]}, lambda a, b: seen.append((a, b)))
        self.assertEqual(seen, [(1, "x"), (1, "y"), (2, "x"), (2, "y")])

    # -- the end of a test

    def ends(self, body: Callable[[Any], None], number: int) -> BaseException | None:
        """Run a test with this body, with a store of its own; return its outcome. No group may be left."""
        self.file_name = f"{self.file_name}.{number}"
        try:
            with_comms(body)(self)
        except BaseException as error:
            return error
        finally:
            self.assertFalse(dist.is_initialized())
        return None

    def test_group_is_destroyed_however_the_test_ends(self) -> None:
        def raises(error: BaseException) -> Callable[[Any], None]:
            def body(_: Any) -> None:
                raise error

            return body

        errors = [ValueError("the test's"), unittest.SkipTest("not today"), SystemExit(75), KeyboardInterrupt()]
        for number, error in enumerate(errors):
            self.assertIs(self.ends(raises(error), number), error)
        self.assertIsNone(self.ends(lambda _: dist.barrier(), len(errors)))

        def destroys(_: Any) -> None:
            dist.barrier()  # as in any process: whoever destroys a group at once may fail a peer that still connects
            dist.destroy_process_group()

        self.assertIsNone(self.ends(destroys, len(errors) + 1))

    def test_group_stays_while_a_peer_creates_it(self) -> None:
        creates, gone = (Path(f"{self.file_name}.{name}") for name in ("creates", "gone"))

        def body(_: Any) -> None:
            with group_creation._creating("a group"):
                if self.rank == 0:
                    creates.touch()
                    # A rank that does not wait for its peers has destroyed its group much sooner.
                    self.assertTrue(stays_true(lambda: not gone.exists()))
                wait_for(creates.exists)
            raise ValueError("the test's")

        self.assertRegex(str(self.ends(body, 0)), "the test's")
        gone.touch()

    def test_error_of_the_test_is_reported_not_that_of_cleaning_up(self) -> None:
        def body(_: Any) -> None:
            raise ValueError("the test's")

        destroy = dist.destroy_process_group

        def fails() -> None:
            destroy()
            raise RuntimeError("cleaning up")

        with mock.patch.object(dist, "destroy_process_group", fails):
            self.assertRegex(str(self.ends(body, 0)), "the test's")
            self.assertRegex(str(self.ends(lambda _: None, 1)), "cleaning up")

    def test_a_rank_that_misses_the_final_barrier(self) -> None:
        def body(_: Any) -> None:
            dist.all_reduce(torch.ones(1, device=self.device_type))  # so that no rank exits before all are connected

        with mock.patch.object(dist, "barrier", side_effect=RuntimeError("a peer is gone")):
            self.assertRegex(str(self.ends(body, 0)), "a peer is gone")

    def test_group_that_cannot_be_created(self) -> None:
        with mock.patch.object(self, "init_pg", side_effect=RuntimeError("no such network")):
            self.assertRegex(str(self.ends(lambda _: None, 0)), "no such network")

    # -- operations under every placement

    def mesh_with_its_device(self) -> DeviceMesh:
        """A mesh of all ranks; sets the default device of new tensors to that of the rank."""
        torch.set_default_device(self.device_type)
        return self.build_device_mesh()

    @with_comms
    def test_converter_tries_every_even_placement(self) -> None:
        mesh = self.mesh_with_its_device()
        ranks = self.world_size
        converter = DTensorConverter(mesh, (torch.ones(2 * ranks, ranks + 1), 7), {"flag": torch.ones(ranks).bool()})
        seen = [(args[0].placements, args[1], kwargs["flag"].placements) for args, kwargs in converter]
        replicated = (Replicate(),)
        self.assertEqual(seen, [(replicated, 7, replicated), ((Shard(0),), 7, replicated)])
        self.assertTrue(converter.successful())
        self.assertEqual([converter.args[1], converter.kwargs["flag"].dtype], [7, torch.bool])

        only = DTensorConverter(mesh, (torch.ones(ranks),), {}, replicate_only=True)
        self.assertEqual([args[0].placements for args, _ in only], [replicated])

    @with_comms
    def test_converter_counts_unsupported_tensors(self) -> None:
        mesh = self.mesh_with_its_device()
        for odd in (
            torch.eye(4).to_sparse(),
            torch.eye(4).to_sparse_csr(),
            torch.ones(12, device="meta"),
            torch.ones(12).conj(),
        ):
            converter = DTensorConverter(mesh, (odd,), {})
            placed = [args[0] for args, _ in converter]
            supported = (
                not odd.is_sparse and odd.layout is torch.strided and odd.device.type != "meta" and not odd.is_conj()
            )
            self.assertEqual(converter.successful(), supported)
            self.assertEqual(isinstance(placed[0], DTensor), supported)
        parameter = DTensorConverter(mesh, (torch.nn.Parameter(torch.ones(12)),), {})
        self.assertTrue(all(isinstance(args[0], torch.nn.Parameter) for args, _ in parameter))
        with self.assertRaisesRegex(RuntimeError, "not a int"):
            parameter.to_dist_tensor(3, mesh, [Replicate()])

    @with_comms
    def test_op_checks_pass(self) -> None:
        mesh = self.mesh_with_its_device()
        torch.manual_seed(0)
        x, y = torch.rand(12, 4), torch.rand(12, 4)
        self._test_op(mesh, torch.add, x, y, alpha=2)
        self._test_op(mesh, lambda a, *, b: a @ b.t(), x, b=y)
        self._test_op_on_dtensor(
            torch.add, distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])
        )

    @with_comms
    def test_op_checks_fail(self) -> None:
        mesh = self.mesh_with_its_device()
        sharded = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])

        def wrong_if_sharded(x: torch.Tensor) -> torch.Tensor:
            return x + 1 if isinstance(x, DTensor) and x.placements[0].is_shard() else x + 0

        with self.assertRaisesRegex(AssertionError, r"placed as \[\(Shard\(dim=0\),\)\]"):
            self._test_op(mesh, wrong_if_sharded, torch.arange(12.0))
        with self.assertRaisesRegex(AssertionError, "close"):
            self._test_op_on_dtensor(wrong_if_sharded, sharded)
        with self.assertRaisesRegex(AssertionError, "could become a DTensor"):
            self._test_op(mesh, torch.sum, torch.eye(4).to_sparse())


instantiate_parametrized_tests(SettingsTest)

if __name__ == "__main__":
    run_tests()
