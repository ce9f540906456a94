"""The comparison of models and optimizers, before anything of them is changed, when a call finds new ones."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import tree

from ..spmd_errors import SPMDError

Facts = Mapping[str, Sequence[str]]


def facts_of(
    params: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[tuple[str, torch.Tensor]], optimizers: list[Optimizer]
) -> dict[str, list[str]]:
    """Everything in which the ranks must agree, one line each, by title."""
    named = [*params]
    numbers = {id(param): number for number, (_, param) in enumerate(named)}
    return {
        "parameters": [f"{name}, {_kind(param)}" for name, param in named],
        "buffers": [f"{name}, {_kind(buffer)}" for name, buffer in buffers],
        "optimizers": [line for optimizer in optimizers for line in _of_optimizer(optimizer, numbers)],
        "optimizer states": [line for optimizer in optimizers for line in _of_state(optimizer, numbers)],
    }


def compare_facts(of_ranks: Sequence[Facts]) -> None:
    """Raise an error if two ranks differ."""
    for title, first in of_ranks[0].items():
        for rank, facts in enumerate(of_ranks):
            other = facts[title]
            if first == other:
                continue
            nothing = f"nothing (rank 0 has {len(first)}, rank {rank} has {len(other)})"
            pairs = itertools.zip_longest(first, other, fillvalue=nothing)
            on_first, on_other = next(pair for pair in pairs if pair[0] != pair[1])
            raise SPMDError(
                f"The ranks differ in their {title}. Rank 0: {on_first}. Rank {rank}: {on_other}.",
                remedy="Build the same model and optimizer on every rank; only values may differ.",
            )


def state_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    leaves = [leaf for optimizer in optimizers for leaf in tree().tree_leaves(dict(optimizer.state))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _of_optimizer(optimizer: Optimizer, numbers: Mapping[int, int]) -> Iterable[str]:
    for number, group in enumerate(optimizer.param_groups):
        params = [numbers.get(id(param)) for param in group["params"]]
        yield f"group {number} of {type(optimizer).__name__} with the parameters {params}"


def _of_state(optimizer: Optimizer, numbers: Mapping[int, int]) -> Iterable[str]:
    for key, value in optimizer.state.items():
        is_tensor = isinstance(key, torch.Tensor)
        owner = f"parameter {numbers.get(id(key))}" if is_tensor else repr(key)
        for path, leaf in tree().tree_flatten_with_path(value)[0]:
            yield f"{owner}{tree().keystr(path)}, {_kind(leaf)}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    return repr(leaf)
