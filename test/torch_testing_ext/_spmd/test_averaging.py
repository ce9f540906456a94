"""How gradients travel: buckets and orders as tables, rows of ranks, and what the ranks send."""

import collections
import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from loops import Parallel, adam, net, update
from torch import nn

from torch_testing_ext._spmd.buckets import agreed_order, positions_of_buckets
from torch_testing_ext._spmd.layout import Rows
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

BUCKETS = {
    "none": ([], [], 10, []),
    "one_too_large": ([99], "a", 10, [[0]]),
    "full": ([5, 5, 5], "aaa", 10, [[0, 1], [2]]),
    "exactly_full": ([10, 10], "aa", 10, [[0], [1]]),
    "too_large_alone": ([4, 99, 4, 4], "aaaa", 10, [[0], [1], [2, 3]]),
    "kinds_apart": ([1, 1, 1, 1], "abab", 10, [[0, 2], [1, 3]]),
    "in_order_of_their_end": ([1, 9, 1, 2], "abab", 10, [[1], [0, 2], [3]]),
}
ORDERS = {
    "nothing": ([], []),
    "nobody": ([[0, 0], [0, 0]], []),
    "one_rank": ([[2, 1, 0]], [1, 0]),
    "same": ([[3, 2, 1], [3, 2, 1]], [2, 1, 0]),
    "first_rank_decides": ([[2, 1], [1, 2]], [1, 0]),
    "only_other_rank": ([[1, 0, 2], [1, 2, 0]], [0, 2, 1]),
}
SHAPES = [(5, 2), (4, 3), (8,), (3,), (1, 2), (2, 2, 2)]


class TestBuckets(TestCase):
    """Data in, decisions out."""

    @parametrize("name", [*BUCKETS])
    def test_positions(self, name):
        sizes, kinds, limit, expected = BUCKETS[name]
        self.assertEqual(list(map(list, positions_of_buckets(sizes, kinds, limit))), expected)

    @parametrize("name", [*ORDERS])
    def test_agreed_order(self, name):
        places, expected = ORDERS[name]
        self.assertEqual(list(agreed_order(places)), expected)


class TestRows(TestCase):
    """The rows of four ranks."""

    @parametrize("shape", SHAPES)
    def test_are_those_of_chunk(self, shape):
        whole = torch.randn(shape)
        chunks = whole.chunk(4)
        for rank in range(4):
            rows = Rows(len(whole), rank, 4)
            self.assertEqual(rows.of(whole), chunks[rank] if rank < len(chunks) else whole[:0])
            self.assertEqual(rows.is_even, len(whole) % 4 == 0)

    @parametrize("shape", SHAPES)
    def test_unpacked(self, shape):
        whole, found = torch.randn(shape), torch.zeros(shape)
        parts = torch.zeros(4, Rows(len(whole), 0, 4).width(whole))
        for rank in range(4):
            mine = Rows(len(whole), rank, 4).of(whole)
            parts[rank, : mine.numel()].view(mine.shape).copy_(mine)
        Rows(len(whole), 0, 4).unpack(parts, found)
        self.assertEqual(found, whole)


COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce")


class TestTraffic(DTensorContinuousTestBase):
    """The elements that a rank sends in a later call, by collective, on two ranks. Headers are not counted."""

    world_size = 2

    def _sent(self, style, step=update, model=None, optimizer=None, **options):
        torch.manual_seed(self.rank)
        model = model or net()
        compiled = compile(parallel_mode=DataParallel(style, **options))(step)
        optimizer = (optimizer or adam)(model)
        for call in range(3):
            compiled(model, optimizer, Parallel(self.rank).batch(call))
        sent = collections.defaultdict(list)

        def counting(name, collective):
            def call(into, mine=None, *args, **kwargs):
                tensor = into if mine is None or name == "all_reduce" else mine
                if tensor.dtype.is_floating_point:
                    sent[name.replace("_single", "").replace("_into_tensor", "")].append(tensor.numel())
                return collective(*(value for value in (into, mine) if value is not None), *args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name in COLLECTIVES:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
            compiled(model, optimizer, Parallel(self.rank).batch(3))
        return dict(sent)

    def test_replicated_gradients_travel_once_and_whole(self):
        self.assertEqual(self._sent("replicate"), {"all_reduce": [73 + 1]})

    def test_rows_travel(self):
        # Seven and three rows are four and two for each rank.
        rows = 4 * 6 + 4 + 2 * 7 + 2
        # At the start, those of gradients that the last call has left, too.
        self.assertEqual(self._sent("fully_shard"), {"all_gather": [rows] * 3, "all_reduce": [73 + 1]})

        def clearing(model, optimizer, batch):
            update(model, optimizer, batch)
            optimizer.zero_grad()

        self.assertEqual(self._sent("fully_shard", clearing), {"all_gather": [rows, rows], "all_reduce": [73 + 1]})

    @parametrize("style", ["replicate", "fully_shard"])
    def test_each_backward_has_buckets(self, style):
        def twice(model, optimizer, batch):
            for layer in (model[0], model):
                layer(batch[0]).sum().backward()

        self.assertEqual(len(self._sent(style, twice, bucket_mb=1e-5)["all_reduce"]), 2 + 4)

    def test_a_parameter_without_rows_stays_whole(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.gain = net(), nn.Parameter(torch.ones(()))

            def forward(self, x):
                return self.inner(x) * self.gain

        self.assertEqual(self._sent("fully_shard", model=Scaled())["all_reduce"], [1 + 1, 73 + 1])


instantiate_parametrized_tests(TestBuckets)
instantiate_parametrized_tests(TestRows)
instantiate_parametrized_tests(TestTraffic)

if __name__ == "__main__":
    run_tests()
