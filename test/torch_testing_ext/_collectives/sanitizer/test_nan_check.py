"""NCCL's own check for NaN, which the kind `nan` turns on in the ranks before they make a group.

The check `nan-check` of benchmarks/gpu/run has a NaN reported under NCCL.
"""

import contextlib
import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from kit.ranks import OnCpu

from torch_testing_ext._torch.groups import group_creators, watched_groups
from torch_testing_ext.common_distributed import MultiProcessTestCase, sanitize
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.causes import is_of_lost_peer

CHECK = "TORCH_NCCL_NAN_CHECK"


class TestFresh(MultiProcessTestCase):
    """Covered on a GPU by the check `nan-check`."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @sanitize("nan")
    def test_asked_for_by_a_test(self):
        """Covered on a GPU by the check `nan-check`."""
        self.assertEqual("1", os.environ[CHECK])

    @sanitize("calls")
    def test_other_kinds(self):
        """No GPU is involved."""
        self.assertNotIn(CHECK, os.environ)

    def test_none(self):
        """No GPU is involved."""
        self.assertNotIn(CHECK, os.environ)


class TestRefused(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        with mock.patch.dict(os.environ, {CHECK: "0"}):
            self._spawn_processes()

    @sanitize("nan")
    def test_a_variable_that_is_set_wins(self):
        """No GPU is involved."""
        self.assertEqual("0", os.environ[CHECK])


@sanitize("nan")
class TestPersistent(OnCpu):
    """Covered on a GPU by the check `nan-check`."""

    def test_asked_for_by_the_class(self):
        """Its ranks have their group before the first test. Covered on a GPU by the check `nan-check`."""
        self.assertEqual("1", os.environ[CHECK])


class TestGroups(unittest.TestCase):
    """Which groups torch 2.15 checks by its own variable. Covered on a GPU by the check `nan-check`."""

    def seen(self, backend, **environ):
        with mock.patch.dict(os.environ, environ):
            with watched_groups._nan_check(backend):
                seen = os.environ.get("TORCH_DIST_NAN_CHECK")
            after = os.environ.get("TORCH_DIST_NAN_CHECK")
        return seen, after

    def test_table(self):
        """Covered on a GPU by the check `nan-check`."""
        on = {CHECK: "1"}
        for backend in ("nccl", "nccl2", "NCCL-lazy", "cpu:gloo,cuda:nccl"):
            self.assertEqual(("1", None), self.seen(backend, **on), backend)
        self.assertEqual((None, None), self.seen("gloo", **on))
        self.assertEqual((None, None), self.seen("nccl"))
        self.assertEqual((None, None), self.seen("nccl", **{CHECK: "0"}))
        self.assertEqual(("0", "0"), self.seen("nccl", TORCH_DIST_NAN_CHECK="0", **on))

    def test_a_group_that_is_made(self):
        """Covered on a GPU by the check `nan-check`: NCCL's groups are made within it."""
        seen = []
        create = dist.distributed_c10d._new_process_group_helper

        def creating(*args, **kwargs):
            seen.append(os.environ.get("TORCH_DIST_NAN_CHECK"))
            raise RuntimeError("no NCCL here")

        update = dist.distributed_c10d._update_default_pg
        with (
            mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", creating),
            mock.patch.object(dist.distributed_c10d, "_update_default_pg", update),
            mock.patch("torch.distributed.c10d_logger._c10d_logger"),
            mock.patch.dict(os.environ, {CHECK: "1"}),
            mock.patch.object(group_creators.inspect, "signature", return_value=_signature(create)),
            mock.patch.object(group_creators, "_creators", []),
        ):
            watched_groups.watch_process_groups(lambda name: contextlib.nullcontext(), is_of_lost_peer)
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._new_process_group_helper(2, 0, [], "nccl", None, "0")
        self.assertEqual(["1"], seen)

    def test_infinities_that_change_nothing(self):
        from torch_testing_ext._torch.tensors import tensor_values

        numbers = torch.tensor([-torch.inf, 1.0])
        for op, found in (("max", None), ("min", (0, 1)), ("sum", (0, 1)), (None, (0, 1))):
            self.assertEqual(tensor_values.non_finite(numbers, tensor_values.neutral_of(op)), found, op)
        self.assertEqual(tensor_values.non_finite(torch.tensor([-torch.inf, torch.nan]), -torch.inf), (1, 0))

    def test_a_graph_that_is_being_captured_is_not_read(self):
        """Covered on a GPU by the check `nan-check`."""
        from torch_testing_ext._torch.tensors import tensor_values

        bad = torch.tensor([float("nan")])
        self.assertEqual((1, 0), tensor_values.non_finite(bad))
        on_device = mock.Mock(is_cuda=True, layout=torch.strided, is_meta=False)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.assertIsNone(tensor_values.non_finite(on_device))


def _signature(function):
    import inspect

    return inspect.Signature.from_callable(function)


if __name__ == "__main__":
    run_tests()
