"""A layer of experts without a router.

Styles shard each expert, distribute whole experts, or do both.

All communication is a change of placement: gathering tokens is Shard(0) to Replicate, combining the experts' results is
Partial to Shard(0); the backward is the reverse of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from torch_testing_ext._torch.tensors import dtensor_parts

# How to shard one expert: w1 produces the hidden features, w2 consumes them.
SHARDED = {"w1": Shard(1), "w2": Shard(2)}
# The placements of parameters, by name.
_Placements = dict[str, list[Placement]]


class Experts(nn.Module):
    """`num_experts` two-layer networks; each processes every token, and the results are summed."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()
        self.gelu = nn.GELU()

    def reset_parameters(self) -> None:
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The tokens are plain tensors here; of weights that are DTensors, this rank uses its shard.
        w1 = _local_part(self.w1)
        w2 = _local_part(self.w2)
        tokens = x.expand(len(w1), *x.shape)
        hidden = self.gelu(torch.bmm(tokens, w1.mT))
        summed: torch.Tensor = torch.bmm(hidden, w2.mT).sum(dim=0)
        return summed


def _local_part(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class ExpertLayer(nn.Module):
    """Computes the mean over all experts for tokens in a (batch, sequence, dim) tensor."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = Experts(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        combined: torch.Tensor = self.experts(x.reshape(-1, x.shape[-1]))
        return (combined / self.num_experts).view(x.shape)


class TensorParallelForExpert(ParallelStyle):
    """Gives every rank a slice of every expert. Shard(0) layouts in and out make it sequence parallel."""

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._prepare_input, self._prepare_output)

    @staticmethod
    def _cut(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        placements: _Placements = {name: [cut] for name, cut in SHARDED.items()}
        _distribute_parameters(module, mesh, placements)

    def _prepare_input(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        layout = self.input_layouts or Replicate()
        return (_share_tokens(inputs[0], mesh, layout),)

    def _prepare_output(self, _module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return _change(output, mesh, Partial(), self.output_layouts)


class ExpertParallel(ParallelStyle):
    """Gives every rank some whole experts: it receives all tokens, and the results of all ranks are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._deal_out, self._prepare_input, self._prepare_output)

    @staticmethod
    def _deal_out(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        placements: _Placements = {}
        for name, _ in module.named_parameters(recurse=False):
            placements[name] = [Shard(0)]
        _distribute_parameters(module, mesh, placements)

    @staticmethod
    def _prepare_input(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return (_share_tokens(inputs[0], mesh, Shard(0)),)

    @staticmethod
    def _prepare_output(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return _combine(output, mesh)


class ExpertParallelWithTP(ParallelStyle):
    """Distributes the experts of an ExpertLayer over `ep_mesh`, and shards each over `tp_mesh`.

    `tp_layout` is the layout of tokens and results on `tp_mesh`: Shard(0) makes it sequence parallel.
    """

    def __init__(self, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, tp_layout: Placement | None = None) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        self.tp_mesh = tp_mesh
        self.tp_layout = tp_layout or Replicate()
        self.ep_tp_mesh = dtensor_parts.concatenate_meshes([ep_mesh, tp_mesh])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = module.get_submodule("experts")
        placements: _Placements = {name: [Shard(0), cut] for name, cut in SHARDED.items()}
        _distribute_parameters(experts, self.ep_tp_mesh, placements)
        module.register_forward_pre_hook(self._share_among_experts)
        module.register_forward_hook(self._combine_experts)
        experts.register_forward_pre_hook(self._share_within_expert)
        experts.register_forward_hook(self._combine_slices)
        return module

    def _share_among_experts(self, _module: nn.Module, inputs: Any) -> Any:
        return (_share_tokens(inputs[0], self.ep_mesh, Shard(0)),)

    def _combine_experts(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return _combine(output, self.ep_mesh)

    def _share_within_expert(self, _module: nn.Module, inputs: Any) -> Any:
        return (_share_tokens(inputs[0], self.tp_mesh, self.tp_layout),)

    def _combine_slices(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return _change(output, self.tp_mesh, Partial(), self.tp_layout)


def _distribute_parameters(module: nn.Module, mesh: DeviceMesh, placements: _Placements) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        if name in placements:
            distributed = distribute_tensor(param, mesh, placements[name])
            module.register_parameter(name, nn.Parameter(distributed))


def _change(x: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    dtensor = DTensor.from_local(x, mesh, [before])
    return dtensor.redistribute(mesh, [after]).to_local()


def _share_tokens(x: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """Gather the tokens of all ranks. Each rank computes only a part of their gradient, which the backward sums."""
    tokens = DTensor.from_local(x, mesh, [layout])
    gathered = tokens.redistribute(mesh, [Replicate()])
    return gathered.to_local(grad_placements=[Partial()])


def _combine(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return _change(x, mesh, Partial(), Shard(0))
