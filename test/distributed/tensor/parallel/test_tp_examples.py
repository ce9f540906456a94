# Copyright (c) Meta Platforms, Inc. and affiliates
# Owner(s): ["oncall: distributed"]
"""Tensor parallelism on example models computes the same numbers as one device, with the expected communication.

The tests run in 4 ranks on 4 accelerators, or in 2 where there are 2 or 3; otherwise, and where a mesh of 2 x 2 needs
more than there are, in 4 ranks on the CPU with gloo.
"""

from __future__ import annotations

import itertools
import unittest
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from torch_testing_ext.common_utils import (
    HardwareClassification,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    MLPModule,
    ModelArgs,
    Transformer,
    create_local_tensor_test_class,
    with_comms,
)

c10d_functional = torch.ops.c10d_functional
all_gather = c10d_functional.all_gather_into_tensor
all_reduce = c10d_functional.all_reduce
reduce_scatter = c10d_functional.reduce_scatter_tensor

Counts = dict[Any, int]


class ExpCommCounts(NamedTuple):
    """How often each collective runs in each phase of a training step."""

    fwd: Counts | None = None
    bwd: Counts | None = None
    optim: Counts | None = None


# All counts were measured on torch 2.13 and 2.15, which agree.
#
# (is_seq_parallel, recompute_activation): (forward, backward). Recomputing repeats, in backward, the all_gather of the
# input: that of sequence parallelism, or that of input_reshard, which keeps only a shard of the input until then. The
# collective at the end of forward is not repeated, since recomputing stops at the last activation.
MLP_COMMS = {
    (False, False): ({all_reduce: 1}, {}),
    (False, True): ({all_reduce: 1}, {all_gather: 1}),
    (True, False): ({all_gather: 1, reduce_scatter: 1}, {all_gather: 1}),
    (True, True): ({all_gather: 1, reduce_scatter: 1}, {all_gather: 2}),
}
# By is_seq_parallel. The 30 all_reduces belong to the norms' parameters: 10 replicated tensors whose gradients are
# partial sums. Adam reads each gradient three times, and each read reduces it again.
TRANSFORMER_COMMS = {
    False: ExpCommCounts({all_reduce: 6, all_gather: 1}, {all_reduce: 9}, {}),
    True: ExpCommCounts({reduce_scatter: 6, all_gather: 6}, {reduce_scatter: 5, all_gather: 6}, {all_reduce: 30}),
}

CLASS_DIM = 1  # of the logits


EMBEDDING_AND_OUTPUT = ("tok_embeddings.weight", "output.weight")
FINAL_NORM = ("norm.weight", "norm.bias")
BLOCK_NORM = ("layers.1.ffn_norm.weight", "layers.1.ffn_norm.bias")
PARTS_OF_ALL_LAYERS = (
    *EMBEDDING_AND_OUTPUT,
    "layers.0.attention.wv.weight",
    "layers.0.feed_forward.w1.bias",
    "layers.1.ffn_norm.bias",
    "layers.1.feed_forward.w2.weight",
)
# (thaw_params, is_seq_parallel, dtype, exp_cnts): the parameters that are trained, None: all of them. Backward stops at
# the first trained parameter, and the optimizer reduces the gradients of trained norms only.
TRAINABLE = [
    (None, True, torch.float32, ExpCommCounts(bwd={reduce_scatter: 5, all_gather: 6}, optim={all_reduce: 30})),
    (None, False, torch.float64, ExpCommCounts(bwd={all_reduce: 9})),
    (
        ("output.weight", *FINAL_NORM),
        True,
        torch.float32,
        ExpCommCounts(bwd={reduce_scatter: 1}, optim={all_reduce: 6}),
    ),
    (EMBEDDING_AND_OUTPUT, True, torch.float32, ExpCommCounts(bwd={reduce_scatter: 5, all_gather: 5})),
    (
        (*EMBEDDING_AND_OUTPUT, *FINAL_NORM),
        True,
        torch.float32,
        ExpCommCounts(bwd={reduce_scatter: 5, all_gather: 5}, optim={all_reduce: 6}),
    ),
    (
        (*EMBEDDING_AND_OUTPUT, *FINAL_NORM, *BLOCK_NORM),
        True,
        torch.float32,
        ExpCommCounts(bwd={reduce_scatter: 5, all_gather: 5}, optim={all_reduce: 12}),
    ),
    (
        PARTS_OF_ALL_LAYERS,
        True,
        torch.float32,
        ExpCommCounts(bwd={reduce_scatter: 5, all_gather: 5}, optim={all_reduce: 3}),
    ),
]


def thaw_name(
    thaw_params: Collection[str] | None, is_seq_parallel: bool, dtype: torch.dtype, exp_cnts: ExpCommCounts
) -> str:
    """PyTorch's name of this test, made of the modules whose parameters are trained."""
    modules = {name.rpartition(".")[0].replace(".", "_") for name in thaw_params or ()}
    thawed = "__".join(sorted(modules)) or "all"
    return f"{'seq_parallel_' if is_seq_parallel else ''}{str(dtype).removeprefix('torch.')}_thaw_{thawed}"


class TestModule(nn.Module):
    """An embedding and a linear layer whose weights have the same shape, so that they can be tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(16, 8)
        torch.manual_seed(2)
        self.fc = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embedding(x))


def some_loss(output: torch.Tensor) -> torch.Tensor:
    """Not the plain sum: its gradient is the same for all rows, so that mixed-up rows would go unnoticed."""
    return output.square().mean()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Detached: before torch 2.13, a parameter has no whole tensor in inference mode."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor


def dtensor_supports_attention(mesh: DeviceMesh) -> bool:
    """Whether DTensor supports this device's attention kernel: none of the CPU's, nor torch's own, up to torch 2.15."""
    heads = distribute_tensor(torch.rand(1, mesh.size(), 2, 2, device=mesh.device_type), mesh, [Shard(1)])
    try:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    except NotImplementedError:
        return False
    except RuntimeError as error:
        # torch's own makes a mask that is a plain tensor. Extensions without a kernel have it.
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        return False
    return True


def target_placements(placements: Sequence[Placement]) -> list[Placement]:
    """The placements of targets for logits with these placements: targets lack the class dimension."""
    placed: list[Placement] = []
    for placement in placements:
        dim = placement.dim if isinstance(placement, Shard) else CLASS_DIM
        placed.append(Replicate() if dim == CLASS_DIM else Shard(dim - (dim > CLASS_DIM)))
    return placed


def multi_dim_loss(test: Callable[..., None]) -> Callable[..., None]:
    """A test of `loss_parallel` on a mesh of 2 x 2."""
    test.takes_four_ranks = True
    why = f"loss_parallel supports 2-D meshes from torch 2.13 on, and this is {torch.__version__}"
    return unittest.skipIf(torch.__version__ < "2.13", why)(test)


class DistTensorParallelExampleTest(DTensorTestBase):
    hw_classification = HardwareClassification.ACCELERATOR

    @property
    def world_size(self) -> int:
        takes_four = hasattr(getattr(self, self._testMethodName), "takes_four_ranks")
        # As PyTorch's, but not 3: they divide nothing here.
        # Not `super()`: the class of local tensors has a copy of this function.
        return 4 if takes_four or DTensorTestBase.world_size.fget(self) == 4 else 2

    # -- a model on one device and its parallel copy

    def _check_module(self, m1: nn.Module, m2: nn.Module, check_grad: bool = False) -> None:
        """Both have the same parameters, or the same gradients, for exactly the parameters that require one."""
        expected, actual = dict(m1.named_parameters()), dict(m2.named_parameters())
        self.assertEqual(set(actual), set(expected))
        for name, parameter in expected.items():
            label = f"{'gradient of' if check_grad else 'parameter'} {name}, rank {self.rank}"
            if not check_grad:
                self.assertEqual(full(actual[name]), parameter, msg=label)
                continue
            for grad in (parameter.grad, actual[name].grad):
                self.assertEqual(grad is not None, parameter.requires_grad, msg=label)
            if parameter.grad is not None:
                self.assertEqual(full(actual[name].grad), parameter.grad, msg=label)

    def train_step(
        self, models: tuple[nn.Module, nn.Module], optims: Sequence[torch.optim.Optimizer], x: torch.Tensor
    ) -> ExpCommCounts:
        """Train both models for one step, check that they agree, and return the parallel model's communication."""
        model, model_tp = models
        optim, optim_tp = optims
        output = model(x)
        with CommDebugMode() as forward:
            output_tp = model_tp(x)
        self.assertEqual(output_tp, output)

        some_loss(output).backward()
        with CommDebugMode() as backward:
            some_loss(output_tp).backward()
        self._check_module(model, model_tp, check_grad=True)

        optim.step()
        with implicit_replication(), CommDebugMode() as optimizer:
            optim_tp.step()
        self._check_module(model, model_tp)
        return ExpCommCounts(*(dict(phase.get_comm_counts()) for phase in (forward, backward, optimizer)))

    # -- MLP

    def _setup_mlp_models(
        self, is_seq_parallel: bool, recompute_activation: bool = False
    ) -> tuple[nn.Module, nn.Module]:
        mesh = self.build_device_mesh()
        model = MLPModule(self.device_type)
        plan = {
            "net1": ColwiseParallel(input_layouts=Shard(0) if is_seq_parallel else None),
            "net2": RowwiseParallel(output_layouts=Shard(0) if is_seq_parallel else None),
        }
        model_tp = parallelize_module(deepcopy(model), mesh, plan)
        if recompute_activation:
            model_tp = checkpoint_wrapper(model_tp, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            # If every rank has the same input, each rank needs to keep only a shard of it for backward.
            model_tp = input_reshard(model_tp, mesh, None if is_seq_parallel else 0)
        return model, model_tp

    def mlp_input(self, is_seq_parallel: bool, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(seed * self.world_size + self.rank if is_seq_parallel else seed)
        return torch.rand(8, 10, device=self.device_type)

    @with_comms
    @parametrize("is_seq_parallel", [True, False])
    @parametrize("recompute_activation", [True, False])
    def test_mlp_training(self, is_seq_parallel: bool, recompute_activation: bool) -> None:
        # PyTorch leaves recompute_activation out, since it "failed multi-gpu tests". On the CPU its numbers are right.
        # Recomputing communicates, too: see MLP_COMMS. One CommDebugMode must cover forward and backward, since a
        # recomputed module that it did not see in forward makes it raise a KeyError.
        model, model_tp = self._setup_mlp_models(is_seq_parallel, recompute_activation)
        self._check_module(model, model_tp)
        optims = [torch.optim.SGD(each.parameters(), lr=0.25) for each in (model, model_tp)]

        x = self.mlp_input(is_seq_parallel)
        output = model(x)
        some_loss(output).backward()
        with CommDebugMode() as comms:
            output_tp = model_tp(x)
            in_forward = dict(comms.get_comm_counts())
            some_loss(output_tp).backward()
        self.assertEqual(output_tp, output)

        in_backward = Counter(comms.get_comm_counts()) - Counter(in_forward)
        self.assertEqual((in_forward, dict(in_backward)), MLP_COMMS[is_seq_parallel, recompute_activation])

        if is_seq_parallel:
            # Each rank's reference model saw only that rank's part of the sequence.
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        self._check_module(model, model_tp, check_grad=True)

        for optim in optims:
            optim.step()
        self._check_module(model, model_tp)
        x = self.mlp_input(is_seq_parallel, seed=1)
        self.assertEqual(model_tp(x), model(x))

    @with_comms
    def test_mlp_inference(self) -> None:
        with torch.inference_mode():
            model, model_tp = self._setup_mlp_models(is_seq_parallel=False)
            self._check_module(model, model_tp)
            x = self.mlp_input(is_seq_parallel=False)
            self.assertEqual(model_tp(x), model(x))

    # -- transformer. No dropout: ranks and a single device draw their random numbers differently.

    def _setup_transformer_models(
        self, args: ModelArgs, is_seq_parallel: bool, dtype: torch.dtype
    ) -> tuple[nn.Module, nn.Module]:
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        model = Transformer(args).to(self.device_type, dtype)
        # Attention runs on each rank's heads as plain tensors: always in float64, as in PyTorch's test, otherwise only
        # if DTensor does not support the kernel.
        local_heads = dtype is torch.float64 or not dtensor_supports_attention(mesh)
        model_tp = Transformer.parallelize(deepcopy(model), mesh, is_seq_parallel, local_output_for_attn=local_heads)
        self._check_module(model, model_tp)
        return model, model_tp

    def tokens(self, args: ModelArgs, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randint(args.vocab_size, (8, 8), device=self.device_type)

    @with_comms
    @parametrize("is_seq_parallel", [True, False])
    @parametrize("dtype", [torch.float64, torch.float32])
    def test_transformer_training(self, is_seq_parallel: bool, dtype: torch.dtype) -> None:
        args = ModelArgs(dropout_p=0.0)
        models = self._setup_transformer_models(args, is_seq_parallel, dtype)
        optims = [torch.optim.Adam(each.parameters(), lr=0.25) for each in models]
        # With this learning rate rounding errors grow fast: float32 stays within its tolerances for only one step.
        for step in range(2 if dtype is torch.float64 else 1):
            for each in models:
                each.zero_grad()
            comms = self.train_step(models, optims, self.tokens(args, seed=step))
            self.assertEqual(comms, TRANSFORMER_COMMS[is_seq_parallel], msg=f"step {step}")

    @with_comms
    @parametrize("thaw_params, is_seq_parallel, dtype, exp_cnts", TRAINABLE, name_fn=thaw_name)
    def test_transformer_req_grad(
        self,
        thaw_params: Collection[str] | None,
        is_seq_parallel: bool,
        dtype: torch.dtype,
        exp_cnts: ExpCommCounts,
    ) -> None:
        args = ModelArgs(dropout_p=0.0, weight_tying=False)
        models = self._setup_transformer_models(args, is_seq_parallel, dtype)
        optims = [torch.optim.Adam(each.parameters(), lr=0.25) for each in models]
        if thaw_params is not None:
            for each in models:
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name in thaw_params)
        comms = self.train_step(models, optims, self.tokens(args))
        self.assertEqual(comms.bwd, exp_cnts.bwd or {})
        self.assertEqual(comms.optim, exp_cnts.optim or {})

    # -- weight tying

    @with_comms
    def test_weight_tying(self) -> None:
        model = TestModule().to(self.device_type)
        plan = {"embedding": ColwiseParallel(), "fc": RowwiseParallel()}
        parallelize_module(model, self.build_device_mesh(), plan)
        torch.manual_seed(0)
        x = torch.randint(16, (5,), device=self.device_type)

        self.assertFalse(torch.allclose(full(model.embedding.weight), full(model.fc.weight)))
        model(x).sum().backward()
        self.assertFalse(torch.allclose(full(model.embedding.weight.grad), full(model.fc.weight.grad)))

        model.zero_grad()
        model.fc.weight = model.embedding.weight
        model(x).sum().backward()
        self.assertIs(model.fc.weight, model.embedding.weight)
        self.assertIs(model.fc.weight.grad, model.embedding.weight.grad)
        self.assertEqual(model.fc.weight.placements, (Shard(1),))
        self.assertEqual(full(model.fc.weight.grad), self.gradient_of_tied_weight(x))

    def gradient_of_tied_weight(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient of the tied weight on one device."""
        model = TestModule().to(self.device_type)
        model.fc.weight = model.embedding.weight
        model(x).sum().backward()
        return model.embedding.weight.grad

    # -- cross entropy with the classes sharded over ranks

    @with_comms
    def test_loss_parallel(self) -> None:
        # The two shapes take different kernels: nll_loss and nll_loss2d.
        for shape in ((8, 16), (8, 16, 12)):
            for shard_dim, reduction in itertools.product(range(len(shape)), ("none", "mean", "sum")):
                with self.subTest(shape=shape, shard_dim=shard_dim, reduction=reduction):
                    if shard_dim == CLASS_DIM:
                        self.check_loss_parallel(shape, reduction)
                    else:
                        self.check_loss_parallel_refused(shape, shard_dim, reduction)

    def check_loss_parallel(self, shape: tuple[int, ...], reduction: str) -> None:
        mesh = self.build_device_mesh()
        x, target, weight = self.loss_inputs(shape)
        dist_x = distribute_tensor(x, mesh, [Shard(CLASS_DIM)])
        loss = F.cross_entropy(x, target, weight, reduction=reduction)
        loss.sum().backward()
        with loss_parallel():
            with CommDebugMode() as forward:
                dist_loss = F.cross_entropy(dist_x, target, weight, reduction=reduction)
            with CommDebugMode() as backward:
                dist_loss.sum().backward()
        self.assertEqual(dict(forward.get_comm_counts()), {all_reduce: 3})
        self.assertEqual(backward.get_total_counts(), 0)
        self.assertEqual(dist_loss.placements, (Replicate(),))
        self.assertEqual(dist_loss.to_local(), loss)
        self.assertEqual(dist_x.grad.placements, (Shard(CLASS_DIM),))
        self.assertEqual(dist_x.grad.full_tensor(), x.grad)

    def check_loss_parallel_refused(self, shape: tuple[int, ...], shard_dim: int, reduction: str) -> None:
        x, target, _ = self.loss_inputs(shape)
        dist_x = distribute_tensor(x, self.build_device_mesh(), [Shard(shard_dim)])
        with loss_parallel(), self.assertRaisesRegex(ValueError, "loss_parallel"):
            F.cross_entropy(dist_x, target, reduction=reduction)

    def check_loss_on_mesh(
        self, shape: tuple[int, ...], placements: Sequence[Placement], expected: dict[str, Sequence[Placement]]
    ) -> None:
        """On a 2 x 2 mesh, with and without class weights. `expected`: the loss's placements by reduction."""
        mesh = self.build_2d_mesh()
        for (reduction, loss_placements), weighted in itertools.product(expected.items(), (False, True)):
            with self.subTest(reduction=reduction, weighted=weighted):
                x, target, weight = self.loss_inputs(shape)
                options = {"weight": weight if weighted else None, "reduction": reduction}
                dist_x = distribute_tensor(x, mesh, placements)
                dist_target = distribute_tensor(target, mesh, target_placements(placements))
                loss = F.cross_entropy(x, target, **options)
                upstream = torch.arange(1.0, loss.numel() + 1, device=self.device_type).reshape(loss.shape)
                loss.backward(upstream)
                with loss_parallel():
                    dist_loss = F.cross_entropy(dist_x, dist_target, **options)
                    # The gradient arrives replicated, and backward has to redistribute it to the loss's placements.
                    dist_loss.backward(distribute_tensor(upstream, mesh, [Replicate(), Replicate()]))
                self.assertEqual(dist_loss.placements, tuple(loss_placements))
                self.assertEqual(dist_loss.full_tensor(), loss)
                self.assertEqual(dist_x.grad.placements, tuple(placements))
                self.assertEqual(dist_x.grad.full_tensor(), x.grad)

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_multi_dim_mesh(self) -> None:
        placements = [Shard(0), Shard(CLASS_DIM)]
        self.check_loss_on_mesh((8, 16), placements, {"sum": [Partial(), Replicate()], "none": [Shard(0), Replicate()]})
        self.check_refused_on_mesh(placements, NotImplementedError, "one-dimensional", ["mean"])

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_replicate_non_tp_dim(self) -> None:
        replicated = [Replicate(), Replicate()]
        self.check_loss_on_mesh((8, 16), [Replicate(), Shard(CLASS_DIM)], {"sum": replicated, "none": replicated})

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_tp_not_last_dim(self) -> None:
        self.check_loss_on_mesh(
            (8, 16),
            [Shard(CLASS_DIM), Shard(0)],
            {"sum": [Replicate(), Partial()], "none": [Replicate(), Shard(0)]},
        )

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_3d_input_non_batch_shard(self) -> None:
        # The sequence is dimension 2 of the logits, and dimension 1 of targets and losses, which lack the classes.
        self.check_loss_on_mesh(
            (4, 16, 6),
            [Shard(2), Shard(CLASS_DIM)],
            {"sum": [Partial(), Replicate()], "none": [Shard(1), Replicate()]},
        )

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_invalid_non_tp_placement(self) -> None:
        placements = [Partial(), Shard(CLASS_DIM)]
        self.check_refused_on_mesh(placements, ValueError, "Shard or Replicate", ["sum", "none", "mean"])

    @with_comms
    @multi_dim_loss
    def test_loss_parallel_plain_tensor_target_rejected_on_multi_dim(self) -> None:
        # A plain tensor is ambiguous: it might hold all targets or only this rank's.
        x, target, _ = self.loss_inputs((8, 16))
        dist_x = distribute_tensor(x, self.build_2d_mesh(), [Shard(0), Shard(CLASS_DIM)])
        with loss_parallel(), self.assertRaisesRegex(ValueError, "requires a DTensor"):
            F.cross_entropy(dist_x, target, reduction="sum")

    def check_refused_on_mesh(
        self, placements: Sequence[Placement], error: type[Exception], message: str, reductions: Sequence[str]
    ) -> None:
        mesh = self.build_2d_mesh()
        x, target, _ = self.loss_inputs((4, 8))
        dist_x = DTensor.from_local(x, mesh, placements, run_check=False)
        dist_target = DTensor.from_local(target, mesh, target_placements(placements), run_check=False)
        for reduction in reductions:
            with self.subTest(reduction=reduction), loss_parallel(), self.assertRaisesRegex(error, message):
                F.cross_entropy(dist_x, dist_target, reduction=reduction)

    def build_2d_mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (2, 2))

    def loss_inputs(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, target classes and class weights, the same on all ranks."""
        torch.manual_seed(0)
        classes = shape[CLASS_DIM]
        x = torch.rand(shape, device=self.device_type, requires_grad=True)
        target = torch.randint(classes, (shape[0], *shape[2:]), device=self.device_type)
        return x, target, torch.rand(classes, device=self.device_type)


instantiate_parametrized_tests(DistTensorParallelExampleTest)

# The same tests in one process, whose tensors hold those of all ranks. Not with transformers: they pass, and take 30
# seconds. PyTorch skips them there. Its wrapper of a test passes no parameters on, so they are instantiated before.
DistTensorParallelExampleTestWithLocalTensor = create_local_tensor_test_class(DistTensorParallelExampleTest)
for test in list(vars(DistTensorParallelExampleTestWithLocalTensor)):
    if test.startswith("test_transformer_"):
        delattr(DistTensorParallelExampleTestWithLocalTensor, test)

if __name__ == "__main__":
    run_tests()
