"""The models and their plans: the same as PyTorch's test models, and the same numbers in every distribution."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from kit.ranks import OneRank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


class DistributedModelTest(DTensorTestBase):
    """Compare with one device, in float64: the output, all gradients, and those of tokens that experts share."""

    @property
    def world_size(self) -> int:
        return 4

    def check(
        self, args: ModelArgs, tp: DeviceMesh | None, ep: DeviceMesh | None = None, seq: bool = False
    ) -> Transformer:
        torch.manual_seed(0)
        model = Transformer(args).to(self.device_type, torch.float64)
        spread = deepcopy(model)
        Transformer.parallelize(spread, tp, seq, local_output_for_attn=tp is not None, ep_mesh=ep)
        tokens = TOKENS.to(self.device_type)
        # Distributed experts take different tokens from each rank: together they have all of them.
        mine = tokens.chunk(ep.size())[ep.get_local_rank()] if ep else tokens
        output, spread_output = model(tokens), spread(mine)
        expected = output.chunk(ep.size())[ep.get_local_rank()] if ep else output
        self.assertEqual(spread_output, expected)
        output.square().sum().backward()
        spread_output.square().sum().backward()
        got = dict(spread.named_parameters())
        for name, parameter in model.named_parameters():
            self.assertEqual(self.whole_gradient(got[name], ep), parameter.grad, msg=f"gradient of {name}")
        return spread

    def whole_gradient(self, parameter: torch.Tensor, ep: DeviceMesh | None) -> torch.Tensor:
        grad = parameter.grad
        assert grad is not None
        dealt_out = (
            isinstance(grad, DTensor) and ep is not None and "experts" in (grad.device_mesh.mesh_dim_names or ())
        )
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        if ep is not None and not dealt_out:
            torch.distributed.all_reduce(whole, group=ep.get_group())  # of the tokens of all ranks
        return whole

    @pytest.mark.slow
    @with_comms
    @parametrize("seq", [True, False])
    @parametrize("experts", [0, 4])
    def test_tensor_parallel(self, seq: bool, experts: int) -> None:
        args = ModelArgs(dropout_p=0.0, num_experts=experts, checkpoint_activations=experts == 0)
        self.check(args, self.build_device_mesh(), seq=seq)

    @with_comms
    def test_expert_parallel(self) -> None:
        mesh = init_device_mesh(self.device_type, (4,), mesh_dim_names=("experts",))
        spread = self.check(ModelArgs(dropout_p=0.0, num_experts=8), None, mesh)
        experts = {n: p.to_local().shape[0] for n, p in spread.named_parameters() if isinstance(p, DTensor)}
        self.assertEqual(experts, {n: 2 for n, _ in spread.named_parameters() if ".experts." in n})
        self.assertNotEqual(experts, {})

    @pytest.mark.slow
    @with_comms
    @parametrize("seq", [True, False])
    def test_expert_and_tensor_parallel(self, seq: bool) -> None:
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("experts", "tp"))
        self.check(ModelArgs(dropout_p=0.0, num_experts=4), mesh["tp"], mesh["experts"], seq)

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
instantiate_parametrized_tests(DistributedModelTest)

if __name__ == "__main__":
    run_tests()
