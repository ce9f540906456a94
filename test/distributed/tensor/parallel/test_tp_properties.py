"""Random MLPs under random tensor-parallel plans: outputs and gradients are those of the unsharded model."""

import copy
import itertools

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import device_meshes, given, settings

PROFILE = settings(max_examples=25, database=None, derandomize=True)
WIDTHS = st.sampled_from([4, 1, 2, 3, 5, 8, 13])


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TestTensorParallel(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @PROFILE
    @given(
        mesh=device_meshes(max_dims=1),
        widths=st.lists(WIDTHS, min_size=3, max_size=5),
        batch=st.sampled_from([2, 1, 3, 5]),
        bias=st.booleans(),
        plan=st.lists(st.sampled_from(["pair", "colwise", "rowwise", "none"]), min_size=4, max_size=4),
    )
    def test_mlp(self, mesh, widths, batch, bias, plan):
        torch.manual_seed(0)
        layers = [nn.Linear(a, b, bias, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
        model = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])
        parallel = parallelize_module(copy.deepcopy(model), mesh, self.styles(len(layers), plan))
        inputs = torch.randn(batch, widths[0], dtype=torch.float64)
        expected, got = model(inputs), full(parallel(inputs))
        self.assertEqual(got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
        for (name, one), two in zip(model.named_parameters(), parallel.parameters(), strict=True):
            self.assertEqual(full(two.grad), one.grad, f"gradient of {name}")

    def styles(self, count, plan):
        """Layers are every second module. A pair is colwise and then rowwise, with nothing gathered in between."""
        styles, layer = {}, 0
        while layer < count:
            kind = plan[layer]
            if kind == "pair" and layer + 1 < count:
                # A local output would not say how uneven the shards are.
                styles[str(2 * layer)] = ColwiseParallel(use_local_output=False)
                styles[str(2 * layer + 2)] = RowwiseParallel()
                layer += 2
                continue
            if kind in ("pair", "colwise"):
                styles[str(2 * layer)] = ColwiseParallel(output_layouts=self.replicate())
            elif kind == "rowwise":
                styles[str(2 * layer)] = RowwiseParallel(input_layouts=self.replicate())
            layer += 1
        return styles

    def replicate(self):
        from torch.distributed.tensor import Replicate

        return Replicate()


if __name__ == "__main__":
    run_tests()
