"""The pure parts of averaging, as tables: buckets, orders, what may start when, headers, checksums."""

import torch

from torch_testing_ext._spmd.averaging import CallHeader, disagreement
from torch_testing_ext._spmd.gradient_buckets import (
    BucketProgress,
    agreed_order,
    bucket_limit,
    lowest_bits,
    plan_buckets,
)
from torch_testing_ext._spmd.parallel_modes import Layout
from torch_testing_ext._spmd.resting_state import Checksum, checksum_of
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

MIB = 2**20

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
SAME = CallHeader(1, 2, 0, 0, 4, False, 77)
HEADERS = {
    "same": ([SAME, SAME], None),
    "refused": ([SAME, SAME._replace(refused=True)], "Rank 1 refused"),
    "step": ([SAME, SAME, SAME._replace(step=3)], "compiled step 1, rank 2 in step 3"),
    "call": ([SAME, SAME._replace(call=3)], "start of call 2 .rank 0. and at the start of call 3"),
    "backward": ([SAME._replace(place=2), SAME._replace(place=1)], "in backward 2 of call 2"),
    "new": ([SAME, SAME._replace(new=2, params=6)], "rank 1 has 6 .2."),
    "checksum": ([SAME, SAME._replace(checksum=78)], "parameters of rank 1 differ"),
}


class TestEnginePlans(TestCase):
    """Data in, decisions out."""

    @parametrize("name", [*BUCKETS])
    def test_buckets(self, name):
        sizes, kinds, limit, expected = BUCKETS[name]
        self.assertEqual(plan_buckets(sizes, kinds, limit), expected)

    @parametrize("name", [*ORDERS])
    def test_agreed_order(self, name):
        positions, expected = ORDERS[name]
        self.assertEqual(agreed_order(positions), expected)

    def test_limit(self):
        for total, accelerator, expected in (
            (100, False, MIB),
            (12 * MIB, False, 3 * MIB),
            (999 * MIB, False, 8 * MIB),
        ):
            self.assertEqual(bucket_limit(total, accelerator), expected)
        self.assertEqual(bucket_limit(999 * MIB, True), 25 * MIB)

    def test_buckets_start_in_order_and_the_last_one_at_the_end(self):
        progress = BucketProgress.of([[5, 4], [3], [2, 1]])
        self.assertEqual([[*progress.arrive(param)] for param in (3, 5, 2, 4, 1)], [[], [], [], [0, 1], []])
        self.assertEqual(progress.next, 2)

    def test_what_is_missing_starts_at_the_end(self):
        progress = BucketProgress.of([[2], [1], [0]])
        self.assertEqual([*progress.arrive(1)], [])
        self.assertEqual(progress.next, 0)

    @parametrize("name", [*HEADERS])
    def test_headers(self, name):
        headers, expected = HEADERS[name]
        found = disagreement(headers)
        if expected is None:
            self.assertIsNone(found)
        else:
            self.assertRegex(found[0], expected)

    def test_bits(self):
        self.assertEqual(lowest_bits(5)[-4:], [0.0, 1.0, 0.0, 1.0])
        self.assertNotEqual(lowest_bits(hash((1, 2))), lowest_bits(hash((1, 3))))
        self.assertEqual(len(lowest_bits(-1)), len(lowest_bits(0)))

    def test_rows(self):
        layout = Layout(torch.Size((5, 2)), True, 2, 4)
        self.assertEqual([layout.rows_of(rank) for rank in range(4)], [(0, 2), (2, 4), (4, 5), (5, 5)])
        self.assertEqual(layout.rows, (4, 5))


VALUES = {
    "float32": torch.randn(70),
    "float64": torch.randn(7, 3, dtype=torch.float64),
    "bfloat16": torch.randn(9).bfloat16(),
    "bool": torch.ones(5, dtype=torch.bool),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "transposed": torch.randn(4, 3).t(),
    "scalar": torch.randn(()),
    "nan": torch.full((3,), float("nan")),
}


class TestChecksum(TestCase):
    """A checksum tells different tensors apart."""

    @parametrize("name", [*VALUES])
    def test_sees_a_change(self, name):
        tensor = VALUES[name].clone()
        before = int(checksum_of([tensor]))
        self.assertEqual(int(checksum_of([tensor.clone()])), before)
        last = tuple(size - 1 for size in tensor.shape)
        tensor[last] = 0 if bool(tensor[last] == 1) else 1
        self.assertNotEqual(int(checksum_of([tensor])), before)

    def test_the_sample_of_a_large_tensor_moves(self):
        tensor = torch.zeros(100_000)
        checksum = Checksum()
        before = [int(checksum.of([tensor], turn)) for turn in range(8)]
        tensor[: 100_000 // 256] = 1
        self.assertTrue(all(int(checksum.of([tensor], turn)) != before[turn] for turn in range(8)))

    def test_sees_other_memory(self):
        checksum, tensors = Checksum(), [torch.zeros(3)]
        checksum.of(tensors, 0)
        self.assertEqual(int(checksum.of([torch.ones(3)], 0)), int(checksum_of([torch.ones(3)])))

    def test_nothing(self):
        self.assertIsNone(checksum_of([]))
        self.assertIsNone(checksum_of([torch.empty(0)]))


instantiate_parametrized_tests(TestEnginePlans)
instantiate_parametrized_tests(TestChecksum)

if __name__ == "__main__":
    run_tests()
