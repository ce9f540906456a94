"""The report of the engine, and the traffic that it counts."""

import functools
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from loops import adam, error, net, update

from torch_testing_ext._spmd.roster import EARLY
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

SIZE = 4 * (6 * 7 + 7 + 7 * 3 + 3)  # the parameters of `net()` in bytes
PARAMS, UPDATED, KEPT = "gather of parameters", "gather of updated parameters", "gather of kept gradients"


def reading(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, next(model.parameters()).norm()


def accumulating(model, optimizer, batch):
    error(model, batch).backward()


def updating_first(model, optimizer, batch):
    optimizer.step()
    optimizer.zero_grad()
    error(model, batch).backward()


def summing(model, optimizer, batch):
    total = sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
    error(model, batch).backward()
    return total


def _largest_tensor():
    plain = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    return max(tensor.untyped_storage().nbytes() for tensor in plain)


class TestEngineReport(DTensorContinuousTestBase):
    """Reports after some calls, on two ranks."""

    world_size = 2

    def _report(self, style, step, calls, model=None):
        torch.manual_seed(self.rank)
        model = model or net()
        optimizer = adam(model)
        compiled = compile(parallel_mode=DataParallel(style))(step)
        for _ in range(calls):
            compiled(model, optimizer, (torch.randn(5, 6), torch.randn(5, 3)))
        return compiled.report()

    def test_replicate(self):
        report = self._report("replicate", update, 3)
        self.assertEqual((report.parameters, report.sharded, report.calls), (4, 0, 3))
        ((bucket,),) = report.backwards
        self.assertEqual(bucket.nbytes, SIZE)
        self.assertEqual(sorted(bucket.params), ["0.bias", "0.weight", "2.bias", "2.weight"])
        self.assertEqual(report.bytes_per_call, SIZE)
        for text in (
            "update: engine on 2 ranks, 3 calls",
            "backward 1 averages",
            "all_reduce of",
            "AdamW updates whole",
        ):
            self.assertIn(text, str(report))
        self.assertEqual(self._report("replicate", functools.partial(update), 1).name, "partial")

    @parametrize(
        "name, step, early, late",
        [
            ("plain", update, {PARAMS: SIZE, KEPT: SIZE, UPDATED: SIZE}, {PARAMS: SIZE}),
            ("reading", reading, {PARAMS: SIZE, KEPT: SIZE, UPDATED: SIZE}, {PARAMS: SIZE, UPDATED: SIZE}),
            (
                "updating_first",
                updating_first,
                {PARAMS: SIZE, KEPT: SIZE, UPDATED: SIZE},
                {PARAMS: SIZE, UPDATED: SIZE},
            ),
            ("accumulating", accumulating, {PARAMS: SIZE, KEPT: SIZE}, {PARAMS: SIZE}),
            ("summing", summing, {PARAMS: SIZE, KEPT: SIZE}, {PARAMS: SIZE, KEPT: SIZE}),
        ],
    )
    def test_traffic(self, name, step, early, late):
        # An all_reduce moves twice its size: three volumes a call, unless the step reads what is gathered on request.
        for calls, expected in ((2, early), (EARLY + 4, late)):
            report = self._report("fully_shard", step, calls)
            self.assertEqual(dict(report.gathered), expected, f"{name} after {calls} calls")
            self.assertEqual(sum(line.nbytes for line in report.backwards[0]), SIZE)
        self.assertIn("4 sharded", str(report))
        self.assertIn("AdamW updates the rank's rows", str(report))

    def test_nothing_whole_between_calls(self):
        """Between calls of fully_shard no tensor of a rank is as large as a weight."""
        model = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.Linear(700, 600))
        optimizer = adam(model)
        step = compile(parallel_mode=DataParallel("fully_shard"))(update)
        for _ in range(2):
            step(model, optimizer, (torch.randn(5, 600), torch.randn(5, 600)))
        gc.collect()
        # A thread of gloo lets go of the last collective's tensors a moment after its wait; no event tells when.
        until = time.monotonic() + 10
        while (largest := _largest_tensor()) >= 600 * 700 * 4 and time.monotonic() < until:
            time.sleep(0.001)
        self.assertLess(largest, 600 * 700 * 4)

    def test_whole_and_broadcast(self):
        """The report gives a reason for everything that fully_shard keeps whole."""

        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = torch.nn.Embedding(8, 6, sparse=True)
                self.scale = torch.nn.Parameter(torch.ones(()))
                self.norm = torch.nn.BatchNorm1d(6, affine=False)

            def forward(self, rows):
                return self.norm(self.embedding(rows)) * self.scale

        model = Scaled()
        loose = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)

        def step(rows):
            optimizer.zero_grad()
            (model(rows).pow(2).sum() + loose.sum()).backward()
            optimizer.step()

        compiled = compile(parallel_mode=DataParallel("fully_shard"))(step)
        for _ in range(3):
            compiled(torch.tensor([1, 2, 3]))
        report = compiled.report()
        self.assertEqual(report.buffers, 6 * 4 + 6 * 4 + 8)
        self.assertEqual(list(report.whole.values()), ["it has no dimensions", "no module holds it"])
        averaged = sum(line.nbytes for lines in report.backwards for line in lines)
        self.assertEqual(report.bytes_per_call, averaged + sum(report.gathered.values()) + report.buffers)
        for text in (
            "scale stays whole",
            "SGD updates whole parameters: gradients are sparse",
            "in buckets that start as they fill",
            "broadcast of buffers",
        ):
            self.assertIn(text, str(report))
        self.assertNotIn("broadcast", str(replace(report, buffers=0)))

    def test_whole_optimizer(self):
        def step(model, optimizer, batch):
            return optimizer.step(lambda: error(model, batch))

        model = net()
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)
        compiled = compile(parallel_mode=DataParallel("fully_shard"))(lambda batch: step(model, lbfgs, batch))
        compiled((torch.randn(5, 6), torch.randn(5, 3)))
        self.assertIn("LBFGS updates whole parameters: it is none of torch's", str(compiled.report()))


instantiate_parametrized_tests(TestEngineReport)

if __name__ == "__main__":
    run_tests()
