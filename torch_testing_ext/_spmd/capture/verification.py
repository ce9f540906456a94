"""Verification: a call that runs a program and the engine on the same state, and compares what they leave behind.

All ranks verify in the same call. If the two differ anywhere, all ranks undo the call and raise an error.
"""

import zlib
from dataclasses import dataclass
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
    """Is a call of a step verified at random? All ranks draw the same."""
    return zlib.crc32(b"%d %d" % (step, call)) % 100 == 0


def is_due(verify: VerifyMode, times: int, step: int, call: int) -> bool:
    """Is a call to be verified of something that has been verified so many times?"""
    if verify == "first":
        return times == 0 or is_drawn(step, call)
    return verify == "always"


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
    leaves = tree().tree_leaves(result)
    record: dict[str, Any] = {f"result {position}": leaf for position, leaf in enumerate(leaves)}
    names: dict[int, str] = {}
    with disable_torch_function():
        for root in found.modules:
            _record_module(record, names, root)
        for number, optimizer in enumerate(found.optimizers):
            _record_optimizer(record, names, optimizer, number)
        return {name: _copy(local_part(value)) for name, value in record.items()}


def _record_module(record: dict[str, Any], names: dict[int, str], root: torch.nn.Module) -> None:
    """Add the state of a module to a record, and the names of its parameters to those by `id`."""
    for name, param in root.named_parameters():
        names[id(param)] = name
        record[f"gradient of {name}"] = param.grad
        record[f"parameter {name}"] = param
        record[f"requires_grad of {name}"] = param.requires_grad
    for name, buffer in root.named_buffers():
        record[f"buffer {name}"] = buffer
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)):
                record[f"{key} of {name or 'the model'}"] = value


def _record_optimizer(record: dict[str, Any], names: dict[int, str], optimizer: Any, number: int) -> None:
    """Add the settings and the state of an optimizer to a record."""
    for position, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                record[f"{key} of group {position}, optimizer {number}"] = value
    for position, (param, state) in enumerate(optimizer.state.items()):
        owner = names.get(id(param), f"entry {position}")
        for path, leaf in tree().tree_flatten_with_path(state)[0]:
            record[f"state{tree().keystr(path)} of {owner}"] = leaf


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Tolerance:
    """The differences that are allowed between a tensor of two runs.

    `floor`: the largest element that the tolerance is relative to, unless that of the tensor is larger. `ignored`: the
    elements that do not count. `switched`: how much of the largest element, and of the norm, a few switched ReLUs may
    change.
    """

    floor: float = 0.0
    ignored: torch.Tensor | None = None
    switched: tuple[float, float] | None = None

    def allows(self, off: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
        """May a tensor of this type differ from the expected one by `off`?"""
        largest_difference = float(off.max())
        if not (dtype.is_floating_point or dtype.is_complex):
            return largest_difference <= 0.0
        largest = _largest(expected)
        if largest_difference <= _TOLERANCES.get(dtype, 1e-4) * max(largest, self.floor):
            return True
        if self.switched is None:
            return False
        of_largest, of_norm = self.switched
        return largest_difference <= of_largest * largest and bool(off.norm() <= of_norm * expected.norm())


def first_difference(mine: dict[str, Any], theirs: dict[str, Any], same_kernels: bool = True) -> str | None:
    """The first difference between two runs, if any: results, gradients, then what follows from them."""
    grads = _gradients_of(theirs)
    largest = max((float(grad.abs().max()) for grad in grads.values()), default=0.0)
    # By parameter: the elements whose gradient rounding decides.
    unclear: dict[str, torch.Tensor] = {}
    for name in sorted({*mine, *theirs}, key=_rank_of_name):
        if name not in mine or name not in theirs:
            return f"only the {'eager' if name in theirs else 'compiled'} step has {name}"
        parameter = name.rpartition(" ")[2]
        if name.startswith("gradient"):
            grad = grads.get(parameter)
            switched = None if grad is None or same_kernels else _SWITCHED.get(grad.dtype)
            difference = _difference(mine[name], theirs[name], Tolerance(0.01 * largest, switched=switched))
            if difference is None and grad is not None:
                unclear[parameter] = _is_unclear(mine[name], grad, largest)
        elif name.startswith(("parameter", "state")):
            difference = _difference(mine[name], theirs[name], Tolerance(ignored=unclear.get(parameter)))
        else:
            difference = _difference(mine[name], theirs[name], Tolerance())
        if difference is not None:
            return f"{name} {difference}"
    return None


def _rank_of_name(name: str) -> tuple[bool, str]:
    """Results and gradients come before what follows from them."""
    return not name.startswith(("result", "gradient")), name


def _gradients_of(record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of a run that can be compared by size, by parameter."""
    grads = {}
    for name, value in record.items():
        is_tensor = name.startswith("gradient of") and isinstance(value, torch.Tensor)
        if is_tensor and value.numel() and value.is_floating_point():
            grads[name.removeprefix("gradient of ")] = value
    return grads


def _is_unclear(mine: torch.Tensor, theirs: torch.Tensor, largest: float) -> torch.Tensor:
    """The elements of a gradient that are small, or differ by more than rounding."""
    size = theirs.to_dense().abs()
    off = (mine - theirs).to_dense().abs()
    noise = _NOISE.get(theirs.dtype, 0.0)
    tolerance = _TOLERANCES.get(theirs.dtype, 0.0)
    return (size <= noise * largest) | (off > tolerance * size)


def _difference(mine: Any, theirs: Any, tolerance: Tolerance) -> str | None:
    """Describe how a value differs from the expected one; None if it does not."""
    if isinstance(theirs, float) and isinstance(mine, float):
        mine = torch.tensor(mine)
        theirs = torch.tensor(theirs)
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        is_comparable = isinstance(theirs, (bool, int, float, complex, str, bytes, type(None)))
        is_same = type(mine) is type(theirs) and (mine == theirs or not is_comparable)
        return None if is_same else f"is {_described(mine)} instead of {_described(theirs)}"
    if (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"is {_described(mine)} instead of {_described(theirs)}"
    if mine.numel() == 0 or torch.equal(mine, theirs):
        return None
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    actual = mine.to_dense().to("cpu", wide)
    expected = theirs.to_dense().to("cpu", wide)
    is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(is_equal, 0.0, (actual - expected).abs()).nan_to_num(nan=float("inf"))
    ignored = tolerance.ignored
    if ignored is not None and ignored.shape == off.shape:
        off = torch.where(ignored.cpu(), 0.0, off)
    if tolerance.allows(off, expected, theirs.dtype):
        return None
    return f"differs by up to {float(off.max()):.2g} (its largest element is {_largest(expected):.2g})"


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite element."""
    return float(torch.where(tensor.isfinite(), tensor.abs(), 0.0).max())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)[:60]
