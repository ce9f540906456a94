"""The comparison of all that two runs of a step left behind."""

from __future__ import annotations

from typing import Any

import torch

from torch_testing_ext._torch.spmd import disable_torch_function, tree

from ..engine.state_finder import FoundState
from .captured_state import local_part

# Relative to the largest element of a tensor. Runs that round alike agree bit for bit; other orders of a sum do not.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A gradient this much smaller than the largest of all is rounding, which optimizers such as Adam amplify.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

RunRecord = dict[str, Any]


def record_run(result: Any, found: FoundState) -> RunRecord:
    """A copy of what a run returned, and of the state that it left: of DTensors, this rank's part."""
    record: RunRecord = {f"result {i}": leaf for i, leaf in enumerate(tree().tree_leaves(result))}
    names: dict[int, str] = {}
    with disable_torch_function():
        for root in found.modules:
            for name, buffer in root.named_buffers():
                record[f"buffer {name}"] = buffer
            for name, param in root.named_parameters():
                names[id(param)] = name
                record[f"gradient of {name}"], record[f"parameter {name}"] = param.grad, param
                record[f"requires_grad of {name}"] = param.requires_grad
            record.update({f"training of {name or 'the model'}": m.training for name, m in root.named_modules()})
        for number, optimizer in enumerate(found.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                record.update({f"{k} of group {i}, optimizer {number}": v for k, v in group.items() if k != "params"})
            for key, value in optimizer.state.items():
                owner = names.get(id(key), str(number) if isinstance(key, torch.Tensor) else str(key))
                for path, leaf in tree().tree_flatten_with_path(value)[0]:
                    record[f"state{tree().keystr(path)} of {owner}"] = leaf
        return {name: _copy(value) for name, value in record.items()}


def _copy(value: Any) -> Any:
    value = local_part(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def first_difference(mine: RunRecord, theirs: RunRecord, scale: float = 1.0) -> str | None:
    """The first difference between two runs, if any: results, gradients, then what follows from them."""
    grads = [v for k, v in theirs.items() if k.startswith("gradient of") and _has_numbers(v)]
    largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
    order = sorted(theirs.keys() | mine.keys(), key=lambda name: (not name.startswith(("result", "gradient")), name))
    for name in order:
        if name not in mine or name not in theirs:
            return f"only the {'eager' if name in theirs else 'compiled'} step has {name}"
        grad = theirs.get(f"gradient of {name.rpartition(' ')[2]}")
        noise = None
        if _has_numbers(grad) and not name.startswith("gradient"):
            noise = grad.abs() <= _NOISE.get(grad.dtype, 0.0) * largest
        floor = 0.01 * largest if name.startswith("gradient") else 0.0
        if found := _difference(mine[name], theirs[name], floor, noise, scale):
            return f"{name} {found}"
    return None


def _has_numbers(grad: Any) -> bool:
    return isinstance(grad, torch.Tensor) and grad.numel() > 0 and grad.is_floating_point()


def _difference(mine: Any, theirs: Any, floor: float, noise: Any, scale: float) -> str | None:
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or mine.layout != theirs.layout:
            return f"is {_described(mine)} instead of {_described(theirs)}"
        return _difference_of_values(mine.to_dense(), theirs.to_dense(), floor, noise, scale)
    if isinstance(mine, float) and isinstance(theirs, float):
        close = abs(mine - theirs) <= scale * 1e-4 * abs(theirs) or mine == theirs or (mine != mine and theirs != theirs)
    elif isinstance(theirs, (bool, int, float, complex, str, bytes, type(None), torch.Tensor)):
        close = type(mine) is type(theirs) and mine == theirs
    else:
        close = type(mine) is type(theirs)
    return None if close else f"is {_described(mine)} instead of {_described(theirs)}"


def _difference_of_values(mine: Any, theirs: Any, floor: float, noise: Any, scale: float) -> str | None:
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
    size = float(off.max())
    if size <= scale * _TOLERANCES.get(theirs.dtype, 1e-4) * max(largest, floor):
        return None
    return f"differs by up to {size:.2g} (its largest element is {largest:.2g})"


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
