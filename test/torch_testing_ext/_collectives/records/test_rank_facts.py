"""What an assertion about the calls of a rank counts."""

import unittest

import torch

from torch_testing_ext._collectives.records.issued_calls import Call, GroupKey, GroupRecord, RankRecord
from torch_testing_ext._collectives.records.rank_facts import RankFacts, bytes_of
from torch_testing_ext.common_utils import run_tests


def facts(*kinds):
    key = GroupKey("0", 0, "gloo")
    group = GroupRecord("0", "default_pg", (0, 1), 0)
    calls = [Call(kind, order=order, given=("[4] float32",)) for order, kind in enumerate(kinds)]
    return RankFacts(RankRecord(0, {key: group}, {key: calls}, True, None))


class OperationsTest(unittest.TestCase):
    def test_an_operation_has_several_forms(self):
        """FSDP2 gathers into one tensor: nobody who looks for a gather too many means only the list of tensors."""
        seen = facts("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter_tensor", "reduce")
        for op, expected in (
            ("all_gather", 3),
            ("all_gather_into_tensor", 1),
            ("all_gather_single", 1),
            ("reduce_scatter", 1),
            ("reduce_scatter_single", 1),
            ("reduce", 1),
            ("gather", 0),
            ("all_to_all", 0),
            (None, 5),
        ):
            with self.subTest(op=op):
                self.assertEqual(seen.calls(op=op), expected)
        self.assertEqual(seen.bytes(op="all_gather"), 48)

    def test_bytes_of_each_type(self):
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            with self.subTest(dtype):
                call = Call("send", given=(f"[3, 2] {str(dtype).removeprefix('torch.')}",))
                self.assertEqual(bytes_of(call), 6 * dtype.itemsize)

    def test_a_word_that_is_no_operation(self):
        """It would count 0, and an assertion that there is none would pass."""
        for op, near in (("allgather", "all_gather"), ("all_reduce_", "all_reduce"), ("isend", "send"), ("", "")):
            with self.subTest(op=op), self.assertRaisesRegex(ValueError, f"no operation '{op}'.*{near}"):
                facts("all_reduce").calls(op=op)

    def test_an_operation_that_only_this_torch_has(self):
        self.assertEqual(facts("window_put").calls(op="window_put"), 1)


if __name__ == "__main__":
    run_tests()
