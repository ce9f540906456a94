"""Checks of distributed state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

from torch_testing_ext._torch import fsdp_parts

# Keeps these frames out of tracebacks.
__unittest = True
# The keys of an optimizer's state dict.
_STATE, _GROUPS = "state", "param_groups"


class VerifyStateDictMixin:
    """Compares state dicts of a distributed model (`dist_...`) with those of the same model on one device."""

    def _compare_tensor(self: Any, orig_tensor: Any, dist_tensor: Any, offload_to_cpu: bool = False) -> None:
        if fsdp_parts.is_sharded(dist_tensor):
            dist_tensor = fsdp_parts.gather_sharded_tensors({"it": dist_tensor})["it"]
        if offload_to_cpu:
            orig_tensor, dist_tensor = orig_tensor.cpu(), dist_tensor.cpu()
        self.assertIsInstance(dist_tensor, torch.Tensor)
        self.assertTrue(torch.allclose(orig_tensor, dist_tensor), f"{orig_tensor} and {dist_tensor}")

    def _verify_msd(
        self: Any,
        msd: dict[str, Any],
        dist_msd: dict[str, Any],
        options: StateDictOptions = StateDictOptions(),  # noqa: B008 (never written to)
        offload_to_cpu: bool = False,
    ) -> None:
        """Compare a model's state dicts. If frozen parameters are ignored, only they may be missing."""
        if not options.ignore_frozen_params:
            self.assertEqual(sorted(msd), sorted(dist_msd))
        for name, parameter in msd.items():
            if name in dist_msd:
                with _name_in_failure(name):
                    self._compare_tensor(parameter, dist_msd[name], offload_to_cpu)
            else:
                self.assertFalse(parameter.requires_grad, f"{name} is not frozen, and missing")

    def _verify_osd(
        self: Any, model: nn.Module, optim: torch.optim.Optimizer, osd: dict[str, Any], dist_osd: dict[str, Any]
    ) -> None:
        """Compare an optimizer's state dicts: `osd` numbers parameters, `dist_osd` names them."""
        number_of = {parameter: n for n, parameter in enumerate(chain(*(g["params"] for g in optim.param_groups)))}
        name_of = {number_of[parameter]: name for name, parameter in model.named_parameters()}
        self.assertEqual(sorted(name_of[n] for n in osd[_STATE]), sorted(dist_osd[_STATE]))
        for number, states in osd[_STATE].items():
            dist_states = dist_osd[_STATE][name_of[number]]
            self.assertEqual(sorted(states), sorted(dist_states), name_of[number])
            for key, state in states.items():
                with _name_in_failure(f"{key} of {name_of[number]}"):
                    self._compare_tensor(state, dist_states[key])
        groups, dist_groups = osd[_GROUPS], dist_osd[_GROUPS]
        if len(dist_groups) > len(groups):
            # One group may be split into several distributed ones, which then differ only in their parameters.
            dist_groups = [{**dist_groups[0], "params": list(chain(*(group["params"] for group in dist_groups)))}]
        self.assertEqual(len(groups), len(dist_groups))
        for group, dist_group in zip(groups, dist_groups, strict=True):
            named = {**group, "params": sorted(name_of[number] for number in group["params"])}
            self.assertEqual(named, {**dist_group, "params": sorted(dist_group["params"])})

    def _verify_osd_by_load(
        self: Any,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        new_optim: torch.optim.Optimizer,
        dist_osd: dict[str, Any],
    ) -> None:
        """Load the distributed state dict into `new_optim`, for the same model; it must then equal `optim`."""
        whole = fsdp_parts.gather_sharded_tensors(dist_osd)
        set_state_dict(model, optimizers=new_optim, model_state_dict={}, optim_state_dict=whole)
        self.assertEqual(optim.state_dict(), new_optim.state_dict())


@contextmanager
def _name_in_failure(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


class FusionEmbedding(nn.Module):
    """Two embeddings."""

    def __init__(self, vocab_size: int, fusion_vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.fusion_embedding = nn.Embedding(fusion_vocab_size, embed_dim)


class FusionEmbeddingWithHook(FusionEmbedding):
    """A FusionEmbedding that saves `embedding.weight` under the name `weight`, as a plain embedding does."""

    def __init__(self, vocab_size: int, fusion_vocab_size: int, embed_dim: int) -> None:
        super().__init__(vocab_size, fusion_vocab_size, embed_dim)
        fsdp_parts.on_state_dict(self, _after_saving, _before_loading)


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}embedding.weight")


def _before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    if state_dict:
        state_dict[f"{prefix}embedding.weight"] = state_dict.pop(f"{prefix}weight")


class FusionEmbeddingWithModifier(FusionEmbeddingWithHook):
    """A FusionEmbeddingWithHook that declares the other name to `torch.distributed.checkpoint.state_dict`."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}
