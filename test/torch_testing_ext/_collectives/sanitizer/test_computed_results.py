"""Tests how results are compared with inputs: what is wrong, and what sound programs give, of every type and kind."""

import unittest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from torch_testing_ext._collectives.records.issued_calls import Call, CallInGroup, GroupRecord, make_record
from torch_testing_ext._collectives.sanitizer.result_checks import results_of, wrong_results
from torch_testing_ext._collectives.sanitizer.result_samples import Begun, ResultSampler, _parts, _split
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext.common_utils import run_tests

WORLD_SIZE = 3
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


class ResultsTest(unittest.TestCase):
    def found(self, kind, inputs, outputs, op=None, root=None, raised=False):
        """The findings about one call; `inputs` and `outputs`: the tensors of each rank."""
        records, results = [], {}
        with TemporaryDirectory() as folder:
            for rank in range(WORLD_SIZE):
                log = Path(folder, f"rank{rank}")
                sampler = ResultSampler(log, lambda: None)
                number = None if op is None else operation_hook.REDUCE_OPS.index(op)
                begun = Begun(f"{kind} [4]", number, root, inputs[rank][0].dtype, _parts(inputs[rank]), outputs[rank])
                sampler.end(begun, order=5)
                sampler.finish()
                results[rank] = results_of(log)
                group = GroupRecord("0", "default_pg", tuple(range(WORLD_SIZE)), rank)
                call = Call(kind, order=5, tells_end=False, raised=raised)
                records.append(make_record(rank, [group], [CallInGroup(call, 0, "c10d")], is_whole=True))
        return [finding.sentence for finding in wrong_results(records, results)]

    def reduced(self, inputs, op):
        total = inputs[0]
        for tensor in inputs[1:]:
            total = REDUCTIONS[op](total, tensor)
        return total

    def test_reductions(self):
        """In each type's own arithmetic, which rounds and wraps around."""
        torch.manual_seed(0)
        for dtype in (*FLOATS, *INTEGERS):
            for op in REDUCTIONS:
                for size in (1, 5000):
                    with self.subTest(dtype=dtype, op=op, size=size):
                        inputs = [(5 * torch.randn(size)).to(dtype) for _ in range(WORLD_SIZE)]
                        total = self.reduced(inputs, op)
                        alike = [[total]] * WORLD_SIZE
                        self.assertEqual(self.found("all_reduce", [[tensor] for tensor in inputs], alike, op), [])
                        wrong = total.clone()
                        wrong[-1] = 3 if total[-1] > 50 else 90
                        (text,) = self.found("all_reduce", [[i] for i in inputs], [[total], [wrong], [total]], op)
                        self.assertIn("rank 1: a buffer of all_reduce [4] was written before wait(): ", text)

    def test_numbers_that_cannot_be_compared(self):
        for op in REDUCTIONS:
            for numbers in (
                (3e38, 3e38, -3e38),
                (1e-30, 1e-30, 1e30),
                (torch.nan, 1.0, 2.0),
                (torch.inf, 1.0, -torch.inf),
            ):
                with self.subTest(op=op, numbers=numbers):
                    inputs = [torch.tensor([number]) for number in numbers]
                    total = self.reduced(inputs, op)
                    self.assertEqual(self.found("all_reduce", [[i] for i in inputs], [[total]] * WORLD_SIZE, op), [])

    def test_every_kind(self):
        inputs = [torch.arange(12.0) + 100 * rank for rank in range(WORLD_SIZE)]
        whole = [[tensor] for tensor in inputs]
        parts = [list(_split([tensor], WORLD_SIZE)) for tensor in inputs]
        total = list(_split([sum(inputs)], WORLD_SIZE))
        nothing = [[]] * WORLD_SIZE
        sound = {
            "broadcast": (whole, [[inputs[2]]] * WORLD_SIZE, None, 2),
            "reduce": (whole, [[inputs[0]], [sum(inputs)], [inputs[2]]], "sum", 1),
            "all_gather": (whole, [inputs] * WORLD_SIZE, None, None),
            "gather": (whole, [[], inputs, []], None, 1),
            "scatter": ([parts[0], parts[1], parts[1]], [[part] for part in parts[0]], None, 0),
            "reduce_scatter": (parts, [[part] for part in total], "sum", None),
            "all_to_all": (parts, [[of_rank[at] for of_rank in parts] for at in range(WORLD_SIZE)], None, None),
            "barrier": (whole, nothing, None, None),
        }
        for kind, (given, got, op, root) in sound.items():
            with self.subTest(kind):
                self.assertEqual(self.found(kind, given, got, op, root), [])
                changed = [[tensor.clone() for tensor in tensors] for tensors in got]
                for tensors in changed:
                    for tensor in tensors[-1:]:
                        tensor[1] = 77.0
                found = self.found(kind, given, changed, op, root)
                self.assertEqual(len(found), kind != "barrier", found)
                self.assertEqual(self.found(kind, given, changed, op, root, raised=True), [])

    def test_tensors_that_cannot_be_read(self):
        mine = torch.arange(12.0)
        for tensor in (mine.view(3, 4).t(), torch.empty(0), torch.empty(3, device="meta"), mine.to_sparse()):
            self.assertEqual(_parts([tensor]), (None,))
        self.assertEqual(list(_split([mine[:4]], WORLD_SIZE)), [])


if __name__ == "__main__":
    run_tests()
