"""NCCL's backends under all their names. torch is made to say that it has two devices and these backends.

The check `devices-bound` of benchmarks/gpu/run uses those that its torch has.
"""

import contextlib
import os
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext import common_distributed
from torch_testing_ext._machine import accelerators, backend_names
from torch_testing_ext._testing.bases import sharded_tensor_base
from torch_testing_ext._testing.bases.distributed_bases import DistributedTestBase
from torch_testing_ext._testing.marks.needs import needs_of
from torch_testing_ext._testing.sharded import fsdp_devices
from torch_testing_ext._testing.sharded.dtensor_bases import DTensorTestBase

NAMES = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl2")


@contextlib.contextmanager
def two_devices():
    """A machine with two CUDA devices; yields what a rank does with torch."""
    done = []
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (accelerators, "device_count", lambda: 2),
            (accelerators, "accelerator_type", lambda: "cuda"),
            (torch.accelerator, "device_count", lambda: 2),
            (torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda")),
            (torch.accelerator, "set_device_index", lambda index: done.append(("device", index))),
            (torch, "set_default_device", lambda device: None),
            (dist, "is_backend_available", lambda name: name in backend_names.NCCL),
            (dist, "init_process_group", lambda *args, **more: done.append(("group", *args, more.get("backend")))),
            (dist, "barrier", lambda **more: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ))
        yield done


class TestNames(unittest.TestCase):
    """Covered on a GPU by the check `devices-bound`."""

    def test_what_is_nccl(self):
        """No GPU is involved."""
        for name in (*NAMES, "cuda:NCCL", "cpu:gloo, cuda:nccl"):
            self.assertTrue(backend_names.uses_nccl(name), name)
            self.assertTrue(accelerators.need_accelerators(name), name)
        for name in ("gloo", "cpu:gloo", "", None, "fake", "mpi", "my-nccl"):
            self.assertFalse(backend_names.uses_nccl(name), name)
            self.assertFalse(accelerators.need_accelerators(name), name)
        self.assertTrue(accelerators.need_accelerators("xpu:xccl"))
        self.assertFalse(backend_names.uses_nccl("xpu:xccl"))

    def test_skip_decorators(self):
        """Covered on a GPU by the check `devices-bound`."""
        for name in NAMES:
            for decorate in (
                common_distributed.nccl_skip_if_lt_x_gpu(name, 3),
                common_distributed.require_n_gpus_for_nccl_backend(3, name),
            ):
                self.assertEqual([3], [need.devices for need in needs_of(decorate(lambda self: None))], name)
        self.assertEqual((), needs_of(common_distributed.nccl_skip_if_lt_x_gpu("gloo", 3)(lambda self: None)))

    def test_backends_that_are_asked_for(self):
        """No GPU is involved."""

        def is_skipped(*names):
            decorated = common_distributed.requires_accelerator_dist_backend(names)(lambda self: None)
            return getattr(decorated, "__unittest_skip__", False)

        with two_devices():
            self.assertEqual([False] * 4, [is_skipped(name) for name in backend_names.NCCL])
            self.assertTrue(is_skipped("unknown"))

    def test_create_pg(self):
        """Covered on a GPU by the check `devices-bound`."""
        for name in NAMES:
            test = DistributedTestBase.__new__(DistributedTestBase)
            with (
                two_devices() as done,
                mock.patch.object(DistributedTestBase, "world_size", 2),
                tempfile.NamedTemporaryFile() as file,
            ):
                test.rank, test.file_name = 1, file.name
                test.create_pg("cuda", backend=name)
            self.assertEqual([("device", 1), ("group", name)], done)

    def test_dtensor(self):
        """Covered on a GPU by the check `devices-bound`."""
        for name in NAMES:
            if ":" in name:
                continue  # gloo is not among the backends of this stand-in
            test = DTensorTestBase.__new__(DTensorTestBase)
            test.rank, test.file_name = 1, os.devnull
            with two_devices() as done, mock.patch.object(DTensorTestBase, "world_size", 2):
                test.init_pg(eager_init=True, backend=name)
            self.assertEqual([("device", 1), ("group", name)], done)

    def test_fsdp(self):
        """Covered on a GPU by the check `devices-bound`."""
        for name in NAMES:
            test = mock.Mock(rank=1, world_size=2, init_method="file:///x")
            with (
                two_devices() as done,
                mock.patch.object(fsdp_devices, "compute_device", lambda rank: torch.device("cuda", rank)),
                mock.patch.object(fsdp_devices, "backend_for", lambda size, name=name: name),
                mock.patch.object(fsdp_devices.dist, "destroy_process_group", lambda: None),
            ):
                fsdp_devices.run_in_group(test, "test_it", None, fake=False)
            self.assertEqual([("device", 1), ("group", name, None)], done)

    def test_sharded_tensor(self):
        """Covered on a GPU by the check `devices-bound`."""
        with two_devices():
            self.assertEqual([True] * 4, [sharded_tensor_base._is_usable(name, 2) for name in backend_names.NCCL])
            self.assertFalse(sharded_tensor_base._is_usable("nccl", 3))
            self.assertFalse(sharded_tensor_base._is_usable("mpi", 2))


if __name__ == "__main__":
    unittest.main()
