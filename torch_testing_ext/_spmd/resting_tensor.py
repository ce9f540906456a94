"""The DTensors that models and optimizers hold between calls, with which nothing goes wrong in silence."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torch_testing_ext._torch.tensors import pytrees
from torch_testing_ext._torch.tensors.tensor_subclasses import dispatch_mode_class
from torch_testing_ext._torch.training import (
    below_torch_function,
    depends_on_places,
    dtensor_like,
    is_read_of_number,
    local_tensor,
    storage_key,
    written_by,
)

from .modes import SPMDError, current_line


class _Memory:
    """The memory of a tensor and its views, with a count of what has been written to it."""

    writes = 0


class RestingTensor(DTensor):
    """A DTensor between calls, and all that torch computes with one.

    torch draws random numbers for each rank's rows, returns a copy where a plain tensor has a view, and reads a part of
    a sum. All of these are refused here.
    """

    __slots__ = ("is_away", "memory", "pair", "source")
    # The two forms of a parameter. It is this parameter if `pair.rest` is this object.
    pair: Any
    # Whether a call has its values.
    is_away: bool
    memory: _Memory
    # Of a copy in place of a view: the memory that it is a copy of, and the writes to it until then.
    source: tuple[_Memory, int] | None

    @staticmethod
    def of(dtensor: DTensor, local: torch.Tensor | None = None) -> "RestingTensor":
        """A tensor like a DTensor, with its memory or that of another local tensor."""
        local = local_tensor(dtensor) if local is None else local
        rests: RestingTensor = dtensor_like(dtensor, local, RestingTensor)
        rests.pair, rests.is_away, rests.memory, rests.source = None, False, _Memory(), None
        return rests

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with below_torch_function(), _Operations():
            if func == _GRADIENT.__get__ or getattr(func, "__name__", None) in _SETTERS:
                args[0]._admit(False)
            if func == _DATA.__set__:
                raise SPMDError(
                    "A DTensor was given another .data, which it does not take.",
                    remedy="Use param.copy_(value) under no_grad, or set it in the step.",
                    where=current_line(),
                )
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What autograd computes, from torch 2.13 on. Before, torch asks no subclass of DTensor.
        return _computed(func, args, kwargs or {})

    def _admit(self, is_written: bool) -> None:
        """Refuse a use for which this has no values, or those of a copy where a plain tensor has a view."""
        if self.is_away:
            raise SPMDError(
                f"The DTensor of parameter {self.pair.name}, or its gradient, is used in a step.",
                remedy="Take the parameter from the model in the step, where it is plain.",
                where=current_line(),
            )
        if self.source is not None and (is_written or self.source[0].writes != self.source[1]):
            raise SPMDError(
                "A part of a DTensor is used, which torch has copied where a plain tensor has a view.",
                remedy="Index the parameter in a step, where it is whole, or copy a whole value to the DTensor.",
                where=current_line(),
            )

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self._admit(False)
        return super().redistribute(*args, **kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        self._admit(False)
        # The program may write to it.
        self.memory.writes += 1
        return super().to_local(**kwargs)

    def as_dtensor(self) -> DTensor:
        """The DTensor with this memory."""
        dtensor: DTensor = dtensor_like(self, local_tensor(self))
        return dtensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        saved = dtensor_like(self, local_tensor(self), requires_grad=self.requires_grad)
        saved.__dict__.update(self.__dict__)
        return saved.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        pair, self.pair = self.pair, None
        try:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        finally:
            self.pair = pair


def _resting(values: Any) -> list[RestingTensor]:
    return [leaf for leaf in pytrees.tree_leaves(values) if isinstance(leaf, RestingTensor)]


class _Operations(dispatch_mode_class()):  # type: ignore[misc]
    """The operations of a function that a program calls with resting tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, unless it is refused."""
    used = _resting((args, kwargs))
    if not used:
        return func(*args, **kwargs)
    written = {id(leaf): leaf for leaf in _resting(written_by(func, args, kwargs))}
    for tensor in used:
        tensor._admit(id(tensor) in written)
        if is_read_of_number(func) and not tensor.placements[0].is_replicate():
            raise SPMDError(
                "The value of a DTensor is read, of which each rank has a part.",
                remedy="Call full_tensor() first, on all ranks.",
                where=current_line(),
            )
    if depends_on_places(func):
        raise SPMDError(
            f"{func} draws random numbers for a DTensor, or fills one by out=: each rank for its rows alone.",
            remedy="Do it in a step that gets the model: parameters are whole there.",
            where=current_line(),
        )
    result = _on_rows(func, args, kwargs)
    for tensor in written.values():
        tensor.memory.writes += 1
    return result


def _on_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """The result that torch computes with DTensors."""
    originals: dict[int, RestingTensor] = {}
    kept = []

    def plain(tensor: RestingTensor) -> DTensor:
        kept.append(tensor.as_dtensor())
        originals[id(kept[-1])] = tensor
        return kept[-1]

    args, kwargs = pytrees.tree_map_only(RestingTensor, plain, (args, kwargs))
    result = func(*args, **kwargs)
    base = next(iter(originals.values()))

    def resting(tensor: DTensor) -> RestingTensor:
        if id(tensor) in originals:
            return originals[id(tensor)]
        if tensor.placements[0].is_partial("avg") and any(map(_is_uneven, originals.values())):
            raise SPMDError(
                f"{func} takes the mean of each rank's rows, and ranks have more or fewer.",
                remedy="Take the sum and divide it, or full_tensor() first, on all ranks.",
                where=current_line(),
            )
        rests = RestingTensor.of(tensor)
        # `module.to()` swaps a parameter with the result.
        rests.pair = base.pair
        if func.is_view:
            if base.source is not None:
                rests.source = base.source
            elif storage_key(local_tensor(rests)) == storage_key(local_tensor(base)):
                rests.memory = base.memory
            else:
                rests.source = base.memory, base.memory.writes
        return rests

    return pytrees.tree_map_only(DTensor, resting, result)


def _is_uneven(tensor: DTensor) -> bool:
    """Whether ranks have parts of different sizes."""
    return any(
        isinstance(placement, Shard) and tensor.shape[placement.dim] % tensor.device_mesh.size()
        for placement in tensor.placements
    )


# Uses of a tensor that are no operations.
_DATA: Any = torch.Tensor.data
_GRADIENT: Any = torch.Tensor.grad
_SETTERS = "__set__", "requires_grad_"


def at_rest(param: Any) -> Any:
    """The DTensor of a parameter of calls, between them. Another parameter is what it is."""
    return param.at_rest() if type(param) is AwayParameter else param


class AwayParameter(nn.Parameter):
    """A parameter of calls, between them: an operation on it is one on its DTensor, which has the values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytrees.tree_map_only(AwayParameter, AwayParameter.at_rest, (args, kwargs or {}))
        return func(*args, **kwargs)

    def at_rest(self) -> RestingTensor:
        """The DTensor of this parameter."""
        rests: RestingTensor = self.__dict__["_pair"].rest
        return rests

    def __getattr__(self, name: str) -> Any:
        return getattr(self.at_rest(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.at_rest(), name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.at_rest(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.at_rest().__reduce_ex__(protocol)
