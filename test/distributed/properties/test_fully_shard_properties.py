"""Train random models under fully_shard: outputs, gradients and parameters are those of one device on all batches."""

import copy
from dataclasses import replace
from unittest import mock

import fully_shard_examples as examples
import torch
import torch.distributed as dist
from fully_shard_models import Layer, batch_of, model_of
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import device_meshes, given, replay, settings

PROFILE = settings(max_examples=15, database=None, derandomize=True)
SIZES = (1, 2, 3, 4, 5, 8)


LAYERS = st.builds(
    Layer,
    size=st.sampled_from(SIZES),
    bias=st.booleans(),
    activation=st.sampled_from(["Identity", "ReLU", "Tanh"]),
    frozen=st.booleans(),
    wrapped=st.booleans(),
    reshard=st.booleans(),
    last_dim=st.booleans(),
)

REDUCE_SCATTER = "reduce_scatter_single" if torch.__version__ >= (2, 13) else "reduce_scatter_tensor"
# In torch 2.15, gradients are reduced in the dtype of the sharded parameters, unless the policy has another one.
REDUCES_WIDE = torch.__version__ >= (2, 15)
DTYPES = (None, torch.float32, torch.bfloat16)
POLICIES = st.fixed_dictionaries(
    {
        "param_dtype": st.sampled_from(DTYPES),
        "reduce_dtype": st.sampled_from(DTYPES),
        "output_dtype": st.sampled_from(DTYPES),
        "cast_forward_inputs": st.booleans(),
    }
)


@requires_gloo()
class TestFullyShard(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def shard(self, model, layers, mesh):
        sharding = mesh.size(mesh.ndim - 1)
        for module, layer in zip(model, layers, strict=True):
            if layer.wrapped:
                placement = layer.placement(sharding)
                fully_shard(module, mesh=mesh, reshard_after_forward=layer.reshard, shard_placement_fn=placement)
        return fully_shard(model, mesh=mesh)

    def full(self, tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def check_same(self, model, reference):
        for (name, parameter), (other, wanted) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            self.assertEqual(name, other)
            self.assertEqual(self.full(parameter), wanted, msg=name)
            self.assertEqual(parameter.grad is None, wanted.grad is None, msg=name)
            if wanted.grad is not None:
                self.assertEqual(self.full(parameter.grad), wanted.grad, msg=f"gradient of {name}")

    @PROFILE
    @replay(examples.TRAINING)
    @given(
        mesh=device_meshes(max_dims=2),
        inputs=st.sampled_from(SIZES),
        layers=st.lists(LAYERS, min_size=1, max_size=4),
        accumulated=st.integers(1, 2),
        steps=st.integers(1, 2),
    )
    def test_training(self, mesh, inputs, layers, accumulated, steps):
        reference = model_of(inputs, layers)
        model = self.shard(copy.deepcopy(reference), layers, mesh)
        trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
        optimizers = [
            torch.optim.SGD(parameters, lr=0.125, momentum=0.5)
            for parameters in (trained, [one for one in model.parameters() if one.requires_grad])
            if trained
        ]
        for step in range(steps):
            for part in range(accumulated):
                model.set_requires_gradient_sync(part == accumulated - 1)
                outputs = model(batch_of(dist.get_rank(), step + part, inputs))
                every = [reference(batch_of(rank, step + part, inputs)) for rank in range(self.world_size)]
                self.assertEqual(outputs, every[dist.get_rank()])
                if trained:
                    (outputs**2).sum().backward()
                    (torch.stack([(output**2).sum() for output in every]).mean()).backward()
            self.check_same(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.check_same(model, reference)

    @settings(PROFILE, max_examples=10)
    @replay(examples.MIXED_PRECISION)
    @given(
        mesh=device_meshes(max_dims=1),
        inputs=st.sampled_from(SIZES),
        layers=st.lists(LAYERS, min_size=1, max_size=3),
        policy=POLICIES,
        wide=st.booleans(),
    )
    def test_mixed_precision(self, mesh, inputs, layers, policy, wide):
        """One step of the root alone, whose policy casts parameters, inputs, outputs and gradients.

        The numbers are small multiples of powers of two and the activations are linear or ReLU: most are exact in each
        dtype. Where they are not, the truth rounds at the same places.
        """
        layers = [replace(layer, activation="ReLU", frozen=False, wrapped=False) for layer in layers]
        reference = model_of(inputs, layers)
        model = fully_shard(copy.deepcopy(reference), mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        dtype = torch.double if wide else policy["param_dtype"] or torch.double
        mine = batch_of(dist.get_rank(), 0, inputs).to(dtype)
        compute = copy.deepcopy(reference).to(policy["param_dtype"] or torch.double)
        if not policy["cast_forward_inputs"] and dtype != next(compute.parameters()).dtype:
            with self.assertRaisesRegex(RuntimeError, "dtype"):
                model(mine)
            return
        outputs = model(mine)
        gradients = []
        for rank in range(self.world_size):
            wanted = compute(batch_of(rank, 0, inputs).to(dtype).to(next(compute.parameters()).dtype))
            wanted = wanted.to(policy["output_dtype"] or wanted.dtype)
            if rank == dist.get_rank():
                self.assertEqual(outputs, wanted)
            gradients.append(torch.autograd.grad(wanted.sum(), list(compute.parameters())))
        with mock.patch.object(dist, REDUCE_SCATTER, wraps=getattr(dist, REDUCE_SCATTER)) as reduced:
            outputs.sum().backward()
        reduce_dtype = policy["reduce_dtype"] or (not REDUCES_WIDE and policy["param_dtype"]) or torch.double
        self.assertEqual({call.kwargs["input"].dtype for call in reduced.call_args_list}, {reduce_dtype})
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            self.assertEqual((parameter.dtype, parameter.grad.dtype), (torch.double, torch.double))
            mean = torch.stack([one.to(reduce_dtype).double() for one in each]).mean(0)
            error = 2 * self.world_size * torch.finfo(reduce_dtype).eps
            self.assertEqual(parameter.grad.full_tensor(), mean, rtol=error, atol=error * 16)


class TestFullyShardOnThreeRanks(TestFullyShard):
    world_size = 3


if __name__ == "__main__":
    run_tests()
