"""Verification: a call that runs a program and the engine on the same state, and compares what they leave behind.

All ranks verify in the same call. If the two differ anywhere, all ranks undo the call and raise an error.
"""

import zlib
from typing import Any, Literal

import torch

from torch_testing_ext._torch.spmd import disable_torch_function, tree

from ..engine.engine_core import StateEngine
from ..engine.state_finder import FoundState
from ..spmd_errors import SPMDError
from .captured_state import local_part
from .snapshot import StateSnapshot

VerifyMode = Literal["first", "always", "off"]
VERIFIES = 4  # the bit of a header that asks all ranks to verify
# Relative to the largest element of a tensor: runs that round alike agree bit for bit, other orders of a sum do not.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Kernels that round differently switch a few ReLUs, each with a row's part of a gradient: what this may change of the
# largest element, and of the norm.
_SWITCHED = {torch.float32: (5e-2, 1e-2)}
# A gradient this much smaller than the largest of all is rounding, which optimizers such as Adam amplify.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def is_drawn(step: int, call: int) -> bool:
    """Whether a call of a step is verified at random. All ranks draw the same."""
    return zlib.crc32(b"%d %d" % (step, call)) % 100 == 0


def is_due(verify: VerifyMode, times: int, step: int, call: int) -> bool:
    """Whether to verify a call of something that has been verified so many times."""
    return verify == "always" or (verify == "first" and (times == 0 or is_drawn(step, call)))


def verified(
    engine: StateEngine,
    found: FoundState,
    tensors: list[torch.Tensor],
    together: bool,
    eager: Any,
    compiled: Any,
    same_kernels: bool = True,
) -> Any:
    """Run a call both ways. Return the result of `compiled`, or raise an error: if `together`, on all ranks."""
    before = StateSnapshot(found, tensors)
    try:
        theirs = record_run(eager(), found)
        before.restore()
        result = compiled()
        difference = first_difference(record_run(result, found), theirs, same_kernels)
        differences = engine.wire.gather_objects(difference) if together else [difference]
        for rank, difference in enumerate(differences):
            if difference is not None:
                raise SPMDError(
                    f"The compiled step is not equivalent to the engine: {difference}, on rank {rank}. Both ran on the "
                    "same batch; the call has been undone.",
                    remedy="The step depends on something that is not recorded, or that is recorded wrongly: drop "
                    'backend=. Or pass compile(verify="off") if the difference does not matter.',
                )
    except BaseException:
        before.restore()
        raise
    return result


def record_run(result: Any, found: FoundState) -> dict[str, Any]:
    """A copy of what a run returned, and of the state that it left: of DTensors, this rank's part."""
    record: dict[str, Any] = {f"result {i}": leaf for i, leaf in enumerate(tree().tree_leaves(result))}
    names: dict[int, str] = {}
    with disable_torch_function():
        for root in found.modules:
            for name, param in root.named_parameters():
                names[id(param)] = name
                record[f"gradient of {name}"], record[f"parameter {name}"] = param.grad, param
                record[f"requires_grad of {name}"] = param.requires_grad
            record.update({f"buffer {name}": buffer for name, buffer in root.named_buffers()})
            for name, module in root.named_modules():
                plain = [item for item in vars(module).items() if isinstance(item[1], (bool, int, float, str))]
                record.update({f"{key} of {name or 'the model'}": value for key, value in plain})
        for number, optimizer in enumerate(found.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                record.update({f"{k} of group {i}, optimizer {number}": v for k, v in group.items() if k != "params"})
            for position, (key, value) in enumerate(optimizer.state.items()):
                for path, leaf in tree().tree_flatten_with_path(value)[0]:
                    record[f"state{tree().keystr(path)} of {names.get(id(key), f'entry {position}')}"] = leaf
        copies = {name: local_part(value) for name, value in record.items()}
        return {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in copies.items()}


def first_difference(mine: dict[str, Any], theirs: dict[str, Any], same_kernels: bool = True) -> str | None:
    """The first difference between two runs, if any: results, gradients, then what follows from them."""
    grads = {k.removeprefix("gradient of "): v for k, v in theirs.items() if k.startswith("gradient of")}
    grads = {k: v for k, v in grads.items() if isinstance(v, torch.Tensor) and v.numel() and v.is_floating_point()}
    largest = max((float(grad.abs().max()) for grad in grads.values()), default=0.0)
    unclear: dict[str, torch.Tensor] = {}  # by parameter: the elements whose gradient rounding decides
    for name in sorted({*mine, *theirs}, key=lambda name: (not name.startswith(("result", "gradient")), name)):
        if name not in mine or name not in theirs:
            return f"only the {'eager' if name in theirs else 'compiled'} step has {name}"
        key, is_grad = name.rpartition(" ")[2], name.startswith("gradient")
        grad = grads.get(key) if is_grad else None
        ignored = unclear.get(key) if name.startswith(("parameter", "state")) else None
        switched = None if grad is None or same_kernels else _SWITCHED.get(grad.dtype)
        found = _difference(mine[name], theirs[name], 0.01 * largest if is_grad else 0.0, ignored, switched)
        if found is not None:
            return f"{name} {found}"
        if grad is not None:
            size, off = grad.to_dense().abs(), (mine[name] - grad).to_dense().abs()
            noise, tolerance = _NOISE.get(grad.dtype, 0.0), _TOLERANCES.get(grad.dtype, 0.0)
            unclear[key] = (size <= noise * largest) | (off > tolerance * size)
    return None


def _difference(
    mine: Any, theirs: Any, floor: float, ignored: torch.Tensor | None, switched: tuple[float, float] | None
) -> str | None:
    if isinstance(theirs, float) and isinstance(mine, float):
        mine, theirs = torch.tensor(mine), torch.tensor(theirs)
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        comparable = isinstance(theirs, (bool, int, float, complex, str, bytes, type(None)))
        same = type(mine) is type(theirs) and (mine == theirs or not comparable)
        return None if same else f"is {_described(mine)} instead of {_described(theirs)}"
    if (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"is {_described(mine)} instead of {_described(theirs)}"
    if mine.numel() == 0 or torch.equal(mine, theirs):
        return None
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    a, b = mine.to_dense().to("cpu", wide), theirs.to_dense().to("cpu", wide)
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    if ignored is not None and ignored.shape == off.shape:
        off = torch.where(ignored.cpu(), 0.0, off)
    size, largest = float(off.max()), float(torch.where(b.isfinite(), b.abs(), 0.0).max())
    exact = not (theirs.is_floating_point() or theirs.is_complex())
    if size <= (0.0 if exact else _TOLERANCES.get(theirs.dtype, 1e-4) * max(largest, floor)):
        return None
    if switched is not None and size <= switched[0] * largest and off.norm() <= switched[1] * b.norm():
        return None
    return f"differs by up to {size:.2g} (its largest element is {largest:.2g})"


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
