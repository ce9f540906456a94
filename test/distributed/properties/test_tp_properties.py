"""Random tensor-parallel MLPs and transformers: outputs and gradients are those of the unsharded model.

MLPs run under random plans on a 1-D mesh, and transformers on a mesh or on one dim of it.
"""

import copy
import itertools

import torch
import tp_property_examples as examples
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_testing_ext.hypothesis_utils import assume, device_meshes, given, replay, settings

PROFILE = settings(max_examples=25, database=None, derandomize=True)
WIDTHS = st.sampled_from([4, 1, 2, 3, 5, 8, 13])


def transformer_args():
    """Arguments of a transformer: the ranks divide the number of heads, and other sizes may be uneven."""

    def make(heads, head_dim, **options):
        return ModelArgs(n_heads=heads, dim=heads * head_dim, max_seq_len=8, dropout_p=0.0, **options)

    return st.builds(
        make,
        st.sampled_from([4, 8]),
        st.sampled_from([2, 1, 3]),
        n_layers=st.integers(1, 2),
        vocab_size=st.sampled_from([8, 3, 4, 7, 11]),
        use_attn_mask=st.booleans(),
        weight_tying=st.booleans(),
        checkpoint_activations=st.booleans(),
    )


def every_rank_has_a_row(rows, ranks):
    """Does every rank hold a row? A rank without rows fails in the lookup, and the others wait for it (docs/found)."""
    each = -(-rows // ranks)
    return each * (ranks - 1) < rows


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@requires_gloo()
class TestTensorParallel(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @PROFILE
    @replay(examples.MLP)
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
        self.check_equal(model, parallel, inputs)

    @settings(PROFILE, max_examples=12)
    @replay(examples.TRANSFORMER)
    @given(
        mesh=device_meshes(max_dims=2),
        args=transformer_args(),
        tokens=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([4, 1, 2, 5, 8])),
        sequence_parallel=st.booleans(),
    )
    def test_transformer(self, mesh, args, tokens, sequence_parallel):
        tp_mesh = mesh if mesh.ndim == 1 else mesh["y"]
        assume(tokens[1] % tp_mesh.size() == 0 or not sequence_parallel)
        assume(every_rank_has_a_row(args.vocab_size, tp_mesh.size()))
        torch.manual_seed(0)
        model = Transformer(args).double()
        # On CPU, DTensor has no sharding rule for the attention kernel, so each rank computes its own heads locally.
        parallel = Transformer.parallelize(copy.deepcopy(model), tp_mesh, sequence_parallel, local_output_for_attn=True)
        self.check_equal(model, parallel, torch.randint(args.vocab_size, tokens))

    def check_equal(self, model, parallel, inputs):
        expected, got = model(inputs), full(parallel(inputs))
        self.assertEqual(got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
        gradients = {name: full(parameter.grad) for name, parameter in parallel.named_parameters()}
        self.assertEqual(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})

    def styles(self, count, plan):
        """Return styles for the linear layers, which are every second module. Nothing is gathered inside a pair."""
        styles, layer = {}, 0
        while layer < count:
            kind = plan[layer]
            if kind == "pair" and layer + 1 < count:
                # A plain local tensor would not record that the shards are uneven.
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
