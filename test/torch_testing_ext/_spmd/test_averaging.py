"""How gradients travel: buckets and orders as tables, rows of ranks, and what the ranks send."""

import torch
from loops import Parallel, adam, error, net, update
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
    def test_packed_and_unpacked(self, shape):
        whole, found = torch.randn(shape), torch.zeros(shape)
        rows = Rows(len(whole), 0, 4)
        parts = torch.zeros(4, rows.width(whole))
        rows.pack(whole, parts)
        for rank in range(4):
            mine = Rows(len(whole), rank, 4).of(whole)
            self.assertEqual(parts[rank, : mine.numel()].view(mine.shape), mine)
        rows.unpack(parts, found)
        self.assertEqual(found, whole)


class TestReports(DTensorContinuousTestBase):
    """What a step says of itself after some calls, on two ranks."""

    world_size = 2

    def _report(self, style, step=update, model=None, calls=3, optimizer=None, **options):
        torch.manual_seed(self.rank)
        model = model or net()
        compiled = compile(parallel_mode=DataParallel(style, **options))(step)
        optimizer = (optimizer or adam)(model)
        for call in range(calls):
            compiled(model, optimizer, Parallel(self.rank).batch(call))
        return compiled.report()

    @parametrize("style, sharded", [("replicate", 0), ("fully_shard", 4)])
    def test_counts(self, style, sharded):
        report = self._report(style)
        self.assertIn(f"update: 2 ranks, 3 calls, 4 parameters, {sharded} sharded", report)
        self.assertIn("backward 1 averages 4 gradients in buckets of", report)
        self.assertNotIn("stays whole", report)

    @parametrize("style", ["replicate", "fully_shard"])
    def test_each_backward_has_buckets(self, style):
        def twice(model, optimizer, batch):
            for layer in (model[0], model):
                layer(batch[0]).sum().backward()

        report = self._report(style, twice, bucket_mb=1e-5)
        self.assertRegex(report, r"backward 1 averages 2 gradients in buckets of [^,]*, [^,]*\n")
        self.assertRegex(report, "backward 2 averages 4 gradients")

    def test_reasons(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.gain = net(), nn.Parameter(torch.ones(()))

            def forward(self, x):
                return self.inner(x) * self.gain

        report = self._report("fully_shard", model=Scaled())
        self.assertIn("gain stays whole", report)
        self.assertIn("AdamW updates the rank's rows", report)
        report = self._report("fully_shard", optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
        self.assertIn("Adafactor updates whole parameters: it is none of torch's elementwise optimizers", report)

    def test_reads_keep_gradients_whole(self):
        def reading(model, optimizer, batch):
            optimizer.zero_grad()
            error(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        self.assertIn("gradients stay whole: the step reads them", self._report("fully_shard", reading))
        self.assertNotIn("stay whole", self._report("fully_shard"))


instantiate_parametrized_tests(TestBuckets)
instantiate_parametrized_tests(TestRows)
instantiate_parametrized_tests(TestReports)

if __name__ == "__main__":
    run_tests()
