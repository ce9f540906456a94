"""A transformer small enough to train in milliseconds, and the plans that distribute it over a mesh.

Module and parameter names are those of PyTorch's test model, so plans and state dicts written for it work here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from .experts import ExpertLayer, ExpertParallel, ExpertParallelWithTP, TensorParallelForExpert


@dataclass
class ModelArgs:
    """The configuration of a Transformer."""

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False
    num_experts: int = 0


class Attention(nn.Module):
    """Causal self-attention. If wq, wk, wv return local tensors, set `n_heads` to the number of heads of one rank."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if args.dim % args.n_heads:
            raise ValueError(f"dim ({args.dim}) must be a multiple of n_heads ({args.n_heads})")
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads
        self.dropout_p = args.dropout_p
        self.resid_dropout = nn.Dropout(args.dropout_p)
        self.use_attn_mask = args.use_attn_mask
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        attended = F.scaled_dot_product_attention(
            self._by_head(self.wq(x)),
            self._by_head(self.wk(x)),
            self._by_head(self.wv(x)),
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.use_attn_mask,
        )
        batch, _, seq_len, _ = attended.shape
        return self.resid_dropout(self.wo(attended.transpose(1, 2).reshape(batch, seq_len, -1)))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = x.shape
        return x.view(batch, seq_len, self.n_heads, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, and dropout."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: torch.Tensor) -> Any:
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class TransformerBlock(nn.Module):
    """Attention, then `feed_forward` or, with `num_experts`, `expert_layer`; each residual, with a norm before it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.has_experts = args.num_experts > 0
        if self.has_experts:
            self.expert_layer = ExpertLayer(args.num_experts, args.dim, 4 * args.dim)
        else:
            self.feed_forward = FeedForward(args.dim, 4 * args.dim, args.dropout_p)

    def forward(self, x: torch.Tensor) -> Any:
        h = x + self.attention(self.attention_norm(x))
        second_half = self.expert_layer if self.has_experts else self.feed_forward
        return h + second_half(self.ffn_norm(h))


class Transformer(nn.Module):
    """Maps tokens to logits, which are float32."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_args = args
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.checkpoint_activations = args.checkpoint_activations
        self._tie_weights()

    def forward(self, tokens: torch.Tensor) -> Any:
        seq_len = tokens.shape[1]
        if seq_len > self.max_seq_len:
            raise ValueError(f"the sequence has {seq_len} tokens, but max_seq_len is {self.max_seq_len}")
        positions = torch.arange(seq_len, device=tokens.device)
        h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpoint_activations else layer(h)
        return self.output(self.norm(h)).float()

    def _blocks(self) -> list[TransformerBlock]:
        return cast("list[TransformerBlock]", list(self.layers))

    def _tie_weights(self) -> None:
        if self.model_args.weight_tying:
            self.output.weight = self.tok_embeddings.weight

    @staticmethod
    def parallelize(
        module: Transformer,
        tp_mesh: DeviceMesh | None,
        use_seq_parallel: bool,
        local_output_for_attn: bool = False,
        ep_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        """Distribute `module` over `tp_mesh` and its experts, if any, over `ep_mesh`, in place.

        With `local_output_for_attn`, attention runs on plain tensors with this rank's heads, which needs no sharding
        rule for the attention kernel.
        """
        if not isinstance(module, Transformer):
            raise TypeError(f"parallelize() takes a Transformer, not a {type(module).__name__}")
        if tp_mesh is None and ep_mesh is None:
            raise ValueError("parallelize() needs tp_mesh, ep_mesh, or both")
        if tp_mesh is not None:
            parallelize_module(module, tp_mesh, _root_plan(use_seq_parallel))
        for block in module._blocks():
            if tp_mesh is not None:
                plan = _attention_plan(use_seq_parallel, local_output_for_attn)
                plan |= _second_half_plan(block, use_seq_parallel, ep_mesh)
                parallelize_module(block, tp_mesh, plan)
            if ep_mesh is not None and block.has_experts:
                _distribute_experts(block.expert_layer, tp_mesh, ep_mesh, use_seq_parallel)
        if tp_mesh is not None:
            if local_output_for_attn:
                for block in module._blocks():
                    block.attention.n_heads = module.model_args.n_heads // tp_mesh.size()
            # Distributing a module replaces its parameters: the tied weight is now two tensors, sharded alike.
            module._tie_weights()
        return module


def _root_plan(seq_parallel: bool) -> dict[str, ParallelStyle]:
    """The Colwise output layer and the Rowwise embedding shard their weights alike, so the weights may be tied."""
    if not seq_parallel:
        return {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
    return {
        # Positions have no batch dimension, so their sequence dimension is 0.
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _attention_plan(seq_parallel: bool, local_output: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        f"attention.{name}": ColwiseParallel(use_local_output=local_output) for name in ("wq", "wk", "wv")
    }
    plan["attention.wo"] = _rowwise(seq_parallel)
    if seq_parallel:
        # Gather once before attention, instead of in each of the three projections.
        plan["attention"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan["attention_norm"] = SequenceParallel()
    return plan


def _second_half_plan(
    block: TransformerBlock, seq_parallel: bool, ep_mesh: DeviceMesh | None
) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if seq_parallel:
        # Experts take plain tensors, which are this rank's part of the sequence.
        plan["ffn_norm"] = SequenceParallel(use_local_output=block.has_experts)
    if not block.has_experts:
        plan["feed_forward.w1"] = ColwiseParallel(input_layouts=Shard(1)) if seq_parallel else ColwiseParallel()
        plan["feed_forward.w2"] = _rowwise(seq_parallel)
    elif ep_mesh is None:
        layout = Shard(0) if seq_parallel else None
        plan["expert_layer.experts"] = TensorParallelForExpert(input_layouts=layout, output_layouts=layout)
    return plan


def _distribute_experts(
    layer: ExpertLayer, tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh, seq_parallel: bool
) -> None:
    if tp_mesh is None:
        parallelize_module(layer.experts, ep_mesh, ExpertParallel())
    else:
        tp_layout = Shard(0) if seq_parallel else None
        parallelize_module(layer, ep_mesh, ExpertParallelWithTP(ep_mesh, tp_mesh, tp_layout))


def _rowwise(seq_parallel: bool) -> RowwiseParallel:
    return RowwiseParallel(output_layouts=Shard(1)) if seq_parallel else RowwiseParallel()
