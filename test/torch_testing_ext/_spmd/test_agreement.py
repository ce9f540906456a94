"""How ranks agree, as tables: headers that differ, and checksums."""

import torch

from torch_testing_ext._spmd.agreement import EARLY, CallPlace, Header, checksum_of, disagreement, in_turns
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

SAME = Header(1, 2, CallPlace.BACKWARD, 0, 4, 0, 77, 5, 0)
HEADERS = {
    "same": ([SAME, SAME], None),
    "failed": ([SAME, SAME._replace(place=CallPlace.FAILED)], "raised an error on rank 1"),
    "all_failed": ([SAME._replace(place=CallPlace.FAILED)] * 2, None),
    "step": (
        [SAME, SAME, SAME._replace(step=3)],
        "in backward 1 of call 2 of step 1, rank 2 in backward 1 of call 2 of step 3",
    ),
    "call": ([SAME, SAME._replace(call=3)], "in backward 1 of call 2 of step 1, rank 1 in backward 1 of call 3"),
    "backward": ([SAME._replace(turn=1), SAME], "in backward 2 of call 2 of step 1, rank 1 in backward 1"),
    "place": (
        [SAME, SAME._replace(place=CallPlace.END)],
        "in backward 1 of call 2 of step 1, rank 1 at the end of call 2",
    ),
    "new": ([SAME, SAME._replace(new=2, params=6)], "rank 1 has 6 .2."),
    "checksum": ([SAME, SAME._replace(checksum=78)], "parameters of rank 1 differ"),
    "gradients": ([SAME, SAME._replace(about=6)], "gradients of different parameters"),
    "updated": ([SAME, SAME._replace(updated=6)], "different parameters"),
    "update": (
        [SAME._replace(place=CallPlace.UPDATE), SAME],
        "rank 0 is at update 1 of call 2 of step 1, rank 1 in backward 1",
    ),
    "outside": ([SAME, SAME._replace(step=-1)], "rank 1 in a backward outside of a step"),
}
VALUES = {
    "float32": torch.randn(70),
    "float64": torch.randn(7, 3, dtype=torch.float64),
    "bfloat16": torch.randn(9).bfloat16(),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "transposed": torch.randn(4, 3).t(),
    "scalar": torch.randn(()),
    "nan": torch.full((3,), float("nan")),
}


class TestHeaders(TestCase):
    """Headers in, a problem and its remedy out."""

    @parametrize("name", [*HEADERS])
    def test_disagreement(self, name):
        headers, expected = HEADERS[name]
        found = disagreement(headers)
        if expected is None:
            self.assertIsNone(found)
        else:
            self.assertRegex(found[0], expected)
            self.assertRegex(found[1], "every rank|all ranks|none|average")


class TestChecksum(TestCase):
    """A checksum tells different tensors apart."""

    @parametrize("name", [*VALUES])
    def test_sees_a_change(self, name):
        tensor = VALUES[name].clone()
        before = checksum_of([tensor])
        self.assertEqual(checksum_of([tensor.clone()]), before)
        tensor[tuple(size - 1 for size in tensor.shape)] = 0
        self.assertNotEqual(checksum_of([tensor]), before)

    @parametrize("size", [4095, 100_003, 300_000])
    def test_sees_each_element_of_a_large_tensor(self, size):
        tensor = torch.randn(size)
        before = checksum_of([tensor])
        for place in (0, 61, 62, size // 2, size - 1):
            changed = tensor.clone()
            changed[place] += 1
            self.assertNotEqual(checksum_of([changed]), before)

    @parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
    @parametrize("shape", [(3, 4), (130, 120), (600, 500), (602, 62)])
    def test_sees_values_that_change_places_or_signs(self, shape, dtype):
        tensor = torch.randn(shape, dtype=dtype)
        before = checksum_of([tensor])
        swapped, negated = tensor.clone(), tensor.clone()
        swapped[[0, 1]] = tensor[[1, 0]]
        negated[1, :2] *= -1
        for changed in (swapped, negated, -tensor, tensor.flip(0), tensor.flip(1)):
            self.assertNotEqual(checksum_of([changed]), before)

    @parametrize("dtype", [torch.float64, torch.float32])
    @parametrize("columns", [127, 254, 256])
    def test_sees_rows_that_change_by_twos(self, columns, dtype):
        tensor = torch.randn((600, columns), dtype=dtype)
        before = checksum_of([tensor])
        for other in (1, 127, 254):
            swapped, negated = tensor.clone(), tensor.clone()
            swapped[[0, other]] = tensor[[other, 0]]
            negated[[0, other]] *= -1
            for changed in (swapped, negated):
                self.assertNotEqual(checksum_of([changed]), before, msg=f"rows 0 and {other}")

    @parametrize("size", [3, 2000])
    def test_sees_tensors_that_change_places(self, size):
        one, other = torch.randn(2, size)
        self.assertNotEqual(checksum_of([one, other]), checksum_of([other, one]))

    def test_takes_a_part_that_begins_at_an_odd_place(self):
        values = torch.randn(4001).bfloat16()
        self.assertEqual(checksum_of([values[1:]]), checksum_of([values[1:].clone()]))

    def test_each_tensor_counts(self):
        tensors = [torch.zeros(3) for _ in range(8)]
        changed = [*tensors[:5], torch.ones(3), *tensors[6:]]
        self.assertNotEqual(checksum_of(changed), checksum_of(tensors))

    def test_replicated_parameters_take_turns_in_later_calls(self):
        tensors = [torch.zeros(3) for _ in range(8)]
        self.assertEqual(len(in_turns(tensors, EARLY - 1)), 8)
        seen = [id(tensor) for call in range(2) for tensor in in_turns(tensors, EARLY + call)]
        self.assertEqual(sorted(seen), sorted(map(id, tensors)))

    def test_nothing(self):
        self.assertEqual(checksum_of([torch.empty(0), torch.eye(2).to_sparse()]), checksum_of([]))


instantiate_parametrized_tests(TestHeaders)
instantiate_parametrized_tests(TestChecksum)

if __name__ == "__main__":
    run_tests()
