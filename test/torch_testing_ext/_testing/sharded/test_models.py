"""The models and their plans: the same as PyTorch's test models, and the same numbers in every distribution."""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import Any

import pytest
import torch
from kit.ranks import OneRank
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed._tensor import common_dtensor as pytorch

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor import common_dtensor as ours
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    MLPStacked,
    ModelArgs,
    Transformer,
    with_comms,
)
from torch_testing_ext.layouts import Layout, check_layouts

TOKENS = torch.randint(8, (8, 8), generator=torch.Generator().manual_seed(0))
VECTORS = torch.rand(8, 10, generator=torch.Generator().manual_seed(0))
MODELS = {
    "rms_norm": (lambda m: m.RMSNormPython(10, eps=0.1), VECTORS),
    "mlp": (lambda m: m.MLPModule("cpu"), VECTORS),
    "mlp_without_bias": (lambda m: m.MLPModule(None, bias=False), VECTORS),
    "mlp_stacked": (lambda m: m.MLPStacked("cpu", n_layers=3), VECTORS),
    "transformer": (lambda m: m.Transformer(m.ModelArgs()), TOKENS),
    "transformer_untied": (lambda m: m.Transformer(m.ModelArgs(weight_tying=False, dropout_p=0, n_layers=1)), TOKENS),
    "transformer_not_causal": (lambda m: m.Transformer(m.ModelArgs(use_attn_mask=False)), TOKENS),
    "transformer_checkpointed": (lambda m: m.Transformer(m.ModelArgs(checkpoint_activations=True)), TOKENS),
}
HAS_EXPERTS = hasattr(pytorch.ModelArgs(), "num_experts")  # from torch 2.12 on
if HAS_EXPERTS:
    MODELS["transformer_of_experts"] = (lambda m: m.Transformer(m.ModelArgs(num_experts=4)), TOKENS)


class SameAsPyTorchsTest(OneRank):
    """A test with a fixed seed finds the same numbers with both models.

    In a rank: if torch is built for CUDA, a backward leaves threads, which prevent later forks.
    """

    @parametrize("name", list(MODELS))
    def test_same_parameters_output_and_gradients(self, name: str) -> None:
        build, x = MODELS[name]
        runs = [self.run_once(build(self.seeded(module)), x) for module in (pytorch, ours)]
        self.assertEqual(runs[1], runs[0], rtol=0, atol=0)

    def seeded(self, module: Any) -> Any:
        torch.manual_seed(1)
        return module

    def run_once(self, model: nn.Module, x: torch.Tensor) -> Any:
        torch.manual_seed(2)  # dropout is drawn in the same order, too
        output = model(x)
        output.square().sum().backward()
        return model.state_dict(), output, {name: p.grad for name, p in model.named_parameters()}

    def test_same_arguments(self) -> None:
        given = vars(ModelArgs())
        if not HAS_EXPERTS:
            del given["num_experts"]
        self.assertEqual(given, vars(pytorch.ModelArgs()))

    def test_mlp_can_be_reset(self) -> None:
        model = ours.MLPModule("cpu")
        before = deepcopy(model.state_dict())
        model.reset_parameters()
        for name, parameter in model.state_dict().items():
            self.assertNotEqual(parameter, before[name])


class MistakesTest(TestCase):
    def test_heads_that_do_not_divide(self) -> None:
        with self.assertRaisesRegex(ValueError, r"dim \(10\) must be a multiple of n_heads \(4\)"):
            Transformer(ModelArgs(dim=10))

    def test_too_many_tokens(self) -> None:
        with self.assertRaisesRegex(ValueError, "the sequence has 20 tokens, but max_seq_len is 16"):
            Transformer(ModelArgs())(torch.zeros(1, 20, dtype=torch.long))

    def test_no_mesh(self) -> None:
        with self.assertRaisesRegex(ValueError, "tp_mesh, ep_mesh, or both"):
            Transformer.parallelize(Transformer(ModelArgs()), None, False)

    def test_another_model(self) -> None:
        with self.assertRaisesRegex(TypeError, "a Transformer, not a MLPStacked"):
            Transformer.parallelize(MLPStacked("cpu"), None, False)  # type: ignore[arg-type]


class TrainedModelTest(TestCase):
    """A transformer trains alike on one device, and with its parameters and experts distributed."""

    def train(self, layout: Layout, args: ModelArgs, seq: bool = False) -> None:
        model = layout.load(Transformer(args))
        tp, ep = ((layout.mesh[axis] if layout.size(axis) > 1 else None) for axis in ("tp", "ep"))
        if tp is not None or ep is not None:
            Transformer.parallelize(model, tp, seq, local_output_for_attn=tp is not None, ep_mesh=ep)
        # Some gradients are DTensors, which torch's foreach does not mix with others.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for tokens in layout.batches(lambda step: TOKENS, steps=1):
            loss = model(tokens).square().sum()
            loss.backward()
            for name, parameter in model.named_parameters() if ep is not None else ():
                if ".experts." in name:
                    self.assertEqual(local_of(parameter).shape[0] * layout.size("ep"), args.num_experts)
                else:
                    # Ranks that share experts have the gradients of their own tokens.
                    torch.distributed.all_reduce(local_of(parameter.grad), group=layout.group("ep"))
            layout.step(model, optimizer, loss)

    @pytest.mark.slow
    @parametrize("seq", [True, False])
    @parametrize("experts", [0, 4])
    def test_tensor_parallel(self, seq: bool, experts: int) -> None:
        args = ModelArgs(dropout_p=0.0, num_experts=experts, checkpoint_activations=experts == 0)
        check_layouts(functools.partial(self.train, args=args, seq=seq), "tp=4", strict=True)

    def test_expert_parallel(self) -> None:
        args = ModelArgs(dropout_p=0.0, num_experts=8)
        check_layouts(functools.partial(self.train, args=args), "ep=2", strict=True)

    @pytest.mark.slow
    @parametrize("seq", [True, False])
    def test_expert_and_tensor_parallel(self, seq: bool) -> None:
        args = ModelArgs(dropout_p=0.0, num_experts=4)
        check_layouts(functools.partial(self.train, args=args, seq=seq), "ep=2 tp=2", strict=True)


def local_of(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DistributedModelTest(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    @with_comms
    def test_weights_stay_tied(self) -> None:
        spread = Transformer(ModelArgs())
        Transformer.parallelize(spread, self.build_device_mesh(), True)
        self.assertIs(spread.output.weight, spread.tok_embeddings.weight)

    @with_comms
    def test_rms_norm_of_a_sharded_tensor(self) -> None:
        norm = ours.RMSNormPython(10).to(self.device_type)
        x = VECTORS.to(self.device_type)
        mesh = self.build_device_mesh()
        norm_of_shards = deepcopy(norm)
        norm_of_shards.weight = nn.Parameter(distribute_tensor(norm.weight, mesh))
        self.assertEqual(norm_of_shards(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), norm(x))


instantiate_parametrized_tests(SameAsPyTorchsTest)
instantiate_parametrized_tests(TrainedModelTest)

if __name__ == "__main__":
    run_tests()
