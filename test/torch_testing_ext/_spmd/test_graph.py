"""The compiled program: its collectives, buckets and memory, and the ways to inspect and change it."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import redirect_stdout

import pytest
import torch
from spmd_training import MLP, Case, capture, normal_batch, step, to_device, train_both
from torch import nn

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._spmd import DataParallel, Override
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

mlp = functools.partial(MLP, (10, 8, 4))


def deep():
    return MLP((64,) * 9)


class TestGraph(DTensorContinuousTestBase):
    """The graph and the report of compiled steps on two ranks."""

    @property
    def world_size(self):
        return 2

    def _compiled(self, mode, model=mlp, calls=2, function=step, batch=None, **options):
        torch.manual_seed(self.rank)
        net = model().to(self.device_type)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        compiled = capture(parallel_mode=mode, **options)(function)
        for i in range(calls):
            compiled(net, optimizer, to_device((batch or normal_batch(6, 10))(self.rank, i), self.device_type))
        return compiled

    def test_collectives(self):
        one_each = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        self.assertEqual(self._compiled(DataParallel("replicate")).report().collectives, {"all_reduce": 1})
        self.assertEqual(self._compiled(DataParallel("fully_shard")).report().collectives, one_each)
        tiny = 1e-6  # one bucket per parameter
        self.assertEqual(
            self._compiled(DataParallel("replicate", bucket_mb=tiny)).report().collectives, {"all_reduce": 4}
        )
        per_parameter = self._compiled(DataParallel("fully_shard", bucket_mb=tiny)).report().collectives
        self.assertEqual(per_parameter, {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4})

    def test_whole_gradients_are_gathered_in_one_collective(self):
        def clipping_step(model, optimizer, batch):
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        found = self._compiled(DataParallel("fully_shard"), function=clipping_step).report().collectives
        self.assertEqual(found, {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1})

    @pytest.mark.slow
    def test_dtypes_are_not_mixed(self):
        class TwoTypes(nn.Module):
            def __init__(self):
                super().__init__()
                self.narrow = nn.Linear(10, 8).bfloat16()
                self.wide = nn.Linear(8, 4)

            def forward(self, x):
                return self.wide(self.narrow(x.bfloat16()).float())

        for style in ("replicate", "fully_shard"):
            report = self._compiled(DataParallel(style), TwoTypes).report()
            for bucket in report.buckets:
                self.assertEqual({name.split(".")[0] for name in bucket.names}, {_owner(bucket.dtype)}, msg=style)
            self.assertEqual(len(report.buckets), 2 if style == "replicate" else 4)

    @pytest.mark.slow
    def test_gradients_are_sent_early_and_awaited_late(self):
        graph = self._compiled(
            DataParallel("replicate", bucket_mb=0.017), deep, batch=normal_batch(4, 64, out=(64,))
        ).graph.graph
        kinds = [str(node.target) for node in graph.nodes]
        starts = [i for i, kind in enumerate(kinds) if "all_reduce_" in kind]
        waits = [i for i, kind in enumerate(kinds) if "wait_tensor" in kind]
        backward = [i for i, node in enumerate(graph.nodes) if str(node.target) == "aten.mm.default"]
        self.assertEqual((len(starts), len(waits)), (8, 8))
        self.assertLess(starts[0], backward[-1], "the first bucket is sent during backward")
        self.assertGreater(waits[0], backward[-1], "no wait before the end of backward")

    @pytest.mark.slow
    def test_parameters_are_updated_bucket_by_bucket(self):
        mode = DataParallel("replicate", bucket_mb=0.017)
        compiled = self._compiled(mode, deep, batch=normal_batch(4, 64, out=(64,)))
        graph, buckets = compiled.graph.graph, compiled.report().buckets
        nodes = list(graph.nodes)
        waits = [i for i, node in enumerate(nodes) if "wait_tensor" in str(node.target)]
        params = set(nodes[:16])
        updates = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.add_.Tensor and n.args[0] in params]
        decays = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mul_.Tensor]
        self.assertEqual((len(waits), len(updates)), (8, 16))
        for wait, following, bucket in zip(waits, [*waits[1:], len(nodes)], buckets, strict=True):
            self.assertEqual(sum(wait < i < following for i in updates), len(bucket.params))
        self.assertGreater(sum(i > waits[0] for i in decays), 12, "momentum decays right before it is used")

    @pytest.mark.slow
    def test_large_gradients_are_written_to_their_bucket(self):
        def square():
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))

        class Tied(nn.Module):
            """A weight used twice, and one whose gradient a matrix product does not compute alone."""

            def __init__(self):
                super().__init__()
                self.a, self.b, self.wide = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
                self.b.weight = self.a.weight
                self.scale = nn.Parameter(torch.ones(64, 64) / 64)

            def forward(self, x):
                return torch.tanh(self.wide(self.b(torch.relu(self.a(x))))) * self.scale.mean(0) @ self.scale

        on_cpu = self.device_type == "cpu"
        for model, copies in ((square, 1), (Tied, None)):
            for bucket_mb in (1e-6, 0.02, None):
                out = 3 if model is square else 64
                case = Case(f"{model.__name__} {bucket_mb}", model, normal_batch(4, 64, out=(out,)), tolerance=0)
                compiled = train_both(self, case, capture(parallel_mode=DataParallel(bucket_mb=bucket_mb)))
                targets = [str(node.target) for node in compiled.graph.graph.nodes]
                written = targets.count("aten.mm.out")
                self.assertEqual(written, (2 if model is square else written) if on_cpu else 0)
                if on_cpu and bucket_mb is None:
                    self.assertGreater(written, 0)
                    if copies is not None:
                        self.assertEqual(targets.count("aten.flatten_dense_tensors.default"), copies)

    @pytest.mark.slow
    def test_the_program_chooses_its_buckets(self):
        def large():
            return nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))

        batch = normal_batch(4, 256, out=(256,))
        replicated = self._compiled(DataParallel("replicate"), large, batch=batch).report().collectives
        self.assertEqual(replicated, {"all_reduce": 4})

    def test_order_of_reads_and_writes(self):
        """A view created before the update and read after it shows the update, however late the gradients arrive."""

        def looking_step(model, optimizer, batch):
            optimizer.zero_grad()
            view = model.layers[0].weight.detach().view(-1)
            before = view.sum()
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return before, view.sum(), model.layers[0].weight.detach().sum()

        torch.manual_seed(self.rank)
        model = mlp().to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = capture()(looking_step)
        for i in range(2):
            found = compiled(model, optimizer, to_device(normal_batch(6, 10)(self.rank, i), self.device_type))
            before, through_view, after = (value.item() for value in found)
            self.assertEqual(through_view, after)
            self.assertNotEqual(before, after)

    def test_passes_are_called(self):
        seen = []

        def first(module):
            seen.append(("custom_passes", isinstance(module, torch.fx.GraphModule)))

        def second(module):
            seen.append(("gm_transformation", isinstance(module, torch.fx.GraphModule)))
            for node in module.graph.nodes:  # change the program: relu to tanh
                if node.target is torch.ops.aten.relu.default:
                    node.target = torch.ops.aten.tanh.default
            return copy.deepcopy(module)

        compiled = self._compiled(DataParallel(custom_passes=first), calls=1, gm_transformation=second)
        self.assertEqual(seen, [("custom_passes", True), ("gm_transformation", True)])
        self.assertIn("aten.tanh", compiled.graph.code)
        self.assertNotIn("aten.relu", compiled.graph.code)

    def test_override(self):
        class Doubled(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x) * 2

        class DoubleLast(Override):
            transformed = 0

            def replacement(self, fqn, orig_submodule):
                return Doubled(orig_submodule) if fqn == "layers.1" else orig_submodule

            def transform(self, gm, flat_state):
                DoubleLast.transformed += len(flat_state)
                return gm

        torch.manual_seed(0)
        model = mlp().to(self.device_type)
        original = model.layers[1]
        x, y = to_device(normal_batch(6, 10)(self.rank, 0), self.device_type)
        expected = (torch.sigmoid(2 * original(torch.relu(model.layers[0](x)))) - y).pow(2).mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = capture(module_override=[DoubleLast()])(step)(model, optimizer, (x, y))
        self.assertEqual(loss, expected.detach())
        self.assertIs(model.layers[1], original)
        self.assertEqual(DoubleLast.transformed, 4)

    def test_report_and_code(self):
        compiled = self._compiled(DataParallel("fully_shard"))
        text = str(compiled.report())
        for part in (
            "step:",
            "captured on 2 ranks, recorded 2 times",
            "all_gather",
            "reduce_scatter",
            "layers.0.weight",
            "KiB float32",
        ):
            self.assertIn(part, text)
        with redirect_stdout(io.StringIO()) as printed:
            code = compiled.print_readable()
        self.assertIn("reduce_scatter_tensor", code)
        self.assertIn("reduce_scatter_tensor", printed.getvalue())
        self.assertEqual(compiled.__name__, "step")


def _owner(dtype):
    return {torch.bfloat16: "narrow", torch.float32: "wide"}[dtype]


if __name__ == "__main__":
    run_tests()
