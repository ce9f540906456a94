"""The comparison of what the eager and the compiled run of a step left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import tree

from ..param_layout import Layout
from ..trace.results import leaves_of
from ..trace.train_state import StepState
from .snapshot import local_part

_tree = tree()
# Relative tolerances. Runs that round alike agree bit for bit; optimizers in another form and other orders of a sum do
# not. A tolerance is relative to the largest element of a tensor.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_LOOSEST = 1e-4
# A gradient this much smaller than the largest of all consists of rounding errors, which optimizers such as Adam
# amplify to full updates.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass
class StepRecord:
    """The values that one run of a step left behind. Tensors of the model and its optimizers are those of this rank."""

    result: list[Any]
    params: list[Any] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    states: dict[tuple[Any, ...], Any] = field(default_factory=dict)


def record(result: Any, state: StepState, layouts: list[Layout], params: list[Any], buffers: list[Any]) -> StepRecord:
    """Record a run with these parameters and buffers, before another one changes them."""
    found = StepRecord([_copied(leaf) for leaf in leaves_of(result)[0]])
    found.params = [_part(param, layout) for param, layout in zip(params, layouts, strict=True)]
    found.grads = [_part(param.grad, layout) for param, layout in zip(params, layouts, strict=True)]
    found.buffers = [_copied(buffer) for buffer in buffers]
    index = {id(param): i for i, param in enumerate(params)}
    for o, optimizer in enumerate(state.optimizers):
        for key, value in optimizer.state.items():
            owner = index.get(id(key))
            for path, leaf in _tree.tree_flatten_with_path(value)[0]:
                layout = None if owner is None else layouts[owner]
                like = layout is not None and isinstance(leaf, torch.Tensor) and leaf.shape == layout.shape
                name = (o, owner if owner is not None else str(key), str(_tree.keystr(path)))
                found.states[name] = _part(leaf, layout) if like else _copied(leaf)
    return found


def _copied(value: Any) -> Any:
    value = local_part(value) if not isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _part(value: Any, layout: Layout | None) -> Any:
    """A copy of this rank's part."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or layout is None:
        part = local_part(value).detach()
    else:
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        part = layout.local_part(value)
    return part.clone()


class Comparison:
    """Compares two records. `scale` loosens the tolerances."""

    def __init__(self, state: StepState, layouts: list[Layout], scale: float) -> None:
        self.state, self.layouts, self.scale = state, layouts, scale

    def first_difference(self, mine: StepRecord, theirs: StepRecord) -> str | None:
        """The largest category of difference comes first: results, gradients, then what follows from them."""
        names = [ref.name for ref in self.state.params]
        self.largest_grad = max((float(g.abs().max()) for g in theirs.grads if _has_numbers(g)), default=0.0)
        if len(mine.result) != len(theirs.result):
            return f"the result has {len(mine.result)} parts instead of {len(theirs.result)}"
        for number, (a, b) in enumerate(zip(mine.result, theirs.result, strict=True)):
            if found := self._difference(a, self._like(b, a)):
                return f"part {number} of the result {found}" if len(mine.result) > 1 else f"the result {found}"
        for i, name in enumerate(names):
            if found := self._difference(mine.grads[i], theirs.grads[i], 0.01 * self.largest_grad):
                return f"the gradient of {name} {found}"
        for i, name in enumerate(names):
            if found := self._difference(mine.params[i], theirs.params[i], noise=self._noise(theirs.grads[i])):
                return f"parameter {name} {found}"
        for ref, a, b in zip(self.state.buffers, mine.buffers, theirs.buffers, strict=True):
            if found := self._difference(a, b):
                return f"buffer {ref.name} {found}"
        return self._difference_of_states(mine, theirs, names)

    def _difference_of_states(self, mine: StepRecord, theirs: StepRecord, names: list[str]) -> str | None:
        for key in [*theirs.states, *mine.states]:
            o, owner, name = key
            title = f"{type(self.state.optimizers[o]).__name__}'s {name.strip('[]')!s} of "
            title += names[owner] if isinstance(owner, int) else str(owner)
            if key not in mine.states or key not in theirs.states:
                return f"{title} exists only in the {'eager' if key in theirs.states else 'compiled'} step"
            noise = self._noise(theirs.grads[owner]) if isinstance(owner, int) else None
            if found := self._difference(mine.states[key], theirs.states[key], noise=noise):
                return f"{title} {found}"
        return None

    def _like(self, theirs: Any, mine: Any) -> Any:
        """This rank's part of a whole tensor that the compiled step returned as a DTensor."""
        if not isinstance(mine, DTensor) or not isinstance(theirs, torch.Tensor) or isinstance(theirs, DTensor):
            return theirs
        layout = self.layouts[0]
        sharded = mine.placements[0].is_shard() and theirs.dim() > 0
        return Layout(theirs.shape, sharded, layout.rank, layout.world).local_part(theirs.detach())

    def _noise(self, grad: Any) -> torch.Tensor | None:
        if not _has_numbers(grad):
            return None
        return grad.abs() <= _NOISE.get(grad.dtype, 0.0) * self.largest_grad  # type: ignore[no-any-return]

    def _difference(self, mine: Any, theirs: Any, floor: float = 0.0, noise: Any = None) -> str | None:
        mine, theirs = local_part(mine), local_part(theirs)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return self._difference_of_tensors(mine, theirs, floor, noise)
        if isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor):
            return f"is {_described(mine)} instead of {_described(theirs)}"
        if isinstance(mine, float) and isinstance(theirs, float):
            close = abs(mine - theirs) <= self.scale * _LOOSEST * abs(theirs) or mine == theirs or mine != mine
            return None if close else f"is {mine} instead of {theirs}"
        plain = isinstance(theirs, (bool, int, float, complex, str, bytes, type(None)))
        return f"is {mine!r} instead of {theirs!r}" if plain and mine != theirs else None

    def _difference_of_tensors(self, mine: Any, theirs: Any, floor: float, noise: Any) -> str | None:
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"is {_described(mine)} instead of {_described(theirs)}"
        if mine.numel() == 0 or torch.equal(mine, theirs):
            return None
        if not (theirs.is_floating_point() or theirs.is_complex()):
            return f"differs in {int((mine != theirs).sum())} of {mine.numel()} elements"
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        a, b = mine.to("cpu", wide), theirs.to("cpu", wide)
        off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
        if noise is not None and noise.shape == off.shape:
            off = torch.where(noise.cpu(), 0.0, off)
        largest = float(b.abs()[b.isfinite()].max()) if b.isfinite().any() else 0.0
        allowed = self.scale * _TOLERANCES.get(theirs.dtype, _LOOSEST) * max(largest, floor)
        size = float(off.max())
        return None if size <= allowed else f"differs by up to {size:.2g} (its largest element is {largest:.2g})"


def _has_numbers(grad: Any) -> bool:
    return isinstance(grad, torch.Tensor) and grad.numel() > 0 and grad.is_floating_point()


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
