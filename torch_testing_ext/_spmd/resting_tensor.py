"""The DTensors of a model between calls, which plain tensors may be combined with: each is whole for an operation.

A parameter, a gradient or a state of an optimizer is its rank's rows between calls. What is elementwise runs on rows,
by DTensor's own operations. Everything else, and an operation with plain tensors, gathers whole tensors, and writes
the rank's rows of what it has changed: a model is called, read and averaged as if it were plain.
"""

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_testing_ext._torch.tensors.nested_tensors import tensors_in
from torch_testing_ext._torch.tracing import (
    backward_accumulates,
    below_subclass_functions,
    dtensor_like,
    gather_into,
    local_tensor,
    outside_dynamo,
    set_local_tensor,
    storage_key,
    traces_for_script,
    version_of,
)

from .gradient_buckets import RECORD, as_real, managed_by
from .parallel_modes import SPMDError

# They look at no values, or only pass them on.
_PASSING_NAMES = """
    grad requires_grad shape dtype device layout is_leaf grad_fn ndim names is_cuda is_sparse is_quantized is_meta size
    dim numel nelement nbytes itemsize stride element_size is_floating_point is_complex is_contiguous is_conj is_neg
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ has_names get_device _version
    __len__ _backward_hooks _post_accumulate_grad_hooks _is_view is_inference is_same_size
    data_ptr untyped_storage storage_offset is_shared output_nr retains_grad backward has_torch_function name
"""
_PASSING = frozenset(_PASSING_NAMES.split())
# Functions of which each row of a result depends on the same rows of the arguments; sums; and copies.
_BY_ROWS_NAMES = """
    data detach detach_ clone contiguous to type float double half bfloat16 cpu cuda zeros_like ones_like empty_like
    full_like copy_ fill_ zero_ add add_ __add__ __iadd__ __radd__ sub sub_ __sub__ __isub__ __rsub__ rsub mul mul_
    __mul__ __imul__ __rmul__ div div_ __truediv__ __itruediv__ __rtruediv__ true_divide pow pow_ __pow__ square
    square_ sqrt sqrt_ rsqrt reciprocal neg __neg__ abs sign exp log clamp clamp_ clamp_min clamp_max maximum minimum
    lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ isnan isfinite isinf nan_to_num eq ne lt le gt ge __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ sum norm vector_norm _amp_foreach_non_finite_check_and_unscale_ _fused_adamw_ _fused_adam_
    _fused_sgd_ _fused_adagrad_
"""
_BY_ROWS = frozenset(_BY_ROWS_NAMES.split())
_CONVERSIONS = frozenset(["to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "detach"])
_SLOTS = frozenset(("__get__", "__set__", "__delete__"))

# By the storage of its rows: each parameter that a call has as a whole, plain tensor.
in_call: dict[int, Any] = {}


class _Rows:
    """All rows of this process."""

    # How often some have been written. DTensors that share rows, such as detached ones, count writes for themselves.
    writes = 0


def note_write_of_rows() -> None:
    """Some rows have changed: a view of a whole tensor gathers it again when it is used."""
    _Rows.writes += 1


class RestingTensor(DTensor):
    """A DTensor that plain tensors may be combined with."""

    __slots__ = ()

    @classmethod
    @outside_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on rows or on whole tensors."""
        kwargs = kwargs or {}
        if ReplacedParameter in types:
            args, kwargs = _replaced(args, kwargs)
        name = _name_of(func)
        if name in _OWN:
            return _OWN[name](*args, **kwargs)
        with below_subclass_functions():
            if getattr(func, "__name__", "") == "__set__":
                return _SETTERS.get(name, func)(*args)
            if name in _PASSING:
                return func(*args, **kwargs)
            _refuse_in_call(args, kwargs)
            if (name in _BY_ROWS or name.startswith("_foreach_")) and not _has_plain(name, args, kwargs):
                try:
                    return _run_by_rows(name, func, args, kwargs)
                except NotImplementedError:
                    # DTensor has no rule for it.
                    pass
            return _WholeRun(func, args, kwargs).result()


class ReplacedParameter(nn.Parameter):
    """A plain parameter while the model holds a DTensor in its place: whatever is done to it is done to that one."""

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    @outside_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _replaced(args, kwargs or {})
        if any(isinstance(value, RestingTensor) for value in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        with below_subclass_functions():
            # Its model is gone.
            return func(*args, **kwargs)


def _replaced(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with the DTensors that have taken the place of parameters."""

    def form(value: torch.Tensor) -> Any:
        managed = managed_by(value) if type(value) is ReplacedParameter else None
        return value if managed is None else managed.rest

    return _mapped(args, form), _mapped(kwargs, form)


def replace_plain(plain: torch.Tensor) -> None:
    """Let a plain parameter stand for the DTensor that has taken its place, for those who have kept it."""
    if type(plain) is nn.Parameter:
        plain.__class__ = ReplacedParameter


def put_back_plain(plain: torch.Tensor) -> None:
    """Let it be itself again."""
    if type(plain) is ReplacedParameter:
        plain.__class__ = nn.Parameter  # type: ignore[assignment]


class ViewOfWhole(torch.Tensor):
    """A view of a gathered tensor: writes to it reach the rows, and it follows them."""

    _gathered: "_Gathered"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _replaced(args, kwargs or {})
        with below_subclass_functions():
            views = [value for value in tensors_in((args, kwargs)) if isinstance(value, ViewOfWhole)]
            if _name_of(func) in _PASSING:
                return func(*args, **kwargs)
            run = _WholeRun(func, args, kwargs, [view._gathered for view in views])
            return run.result()


def _name_of(func: Any) -> str:
    """The name of a function; where an attribute is read or set, that of the attribute."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in _SLOTS else name


def rest_as(dtensor: Any) -> Any:
    """Let a DTensor be a `RestingTensor`, as the same object."""
    if type(dtensor) is DTensor:
        dtensor.__class__ = RestingTensor
    return dtensor


def resting_like(dtensor: Any, local: torch.Tensor) -> Any:
    """A `RestingTensor` with the shape and placements of another one."""
    return rest_as(dtensor_like(dtensor, local))


# --------------------------------------------------------------------------------------------------------------------
# A function that runs on rows.


def _run_by_rows(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    result = _mapped(func(*args, **kwargs), _as_result)
    if _writes(name):
        note_write_of_rows()
        # DTensor's own operations do not count writes to rows.
        for value in tensors_in((args, kwargs)):
            if isinstance(value, DTensor):
                increment_version(local_tensor(value))
    _allow_swap(name, next(tensors_in((args, kwargs)), None), result)
    return result


def _writes(name: str) -> bool:
    """Does a function of this name write into an argument?"""
    # Of the names with two underscores, those of `+=` and the like do; those such as `__rsub__` do not.
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))


def _as_result(value: torch.Tensor) -> torch.Tensor:
    """A result as one that later functions may take: sums of rows become those of all ranks."""
    if type(value) is DTensor and any(placement.is_partial() for placement in value.placements):
        value = value.redistribute(placements=[Replicate()] * len(value.placements))
    return rest_as(value)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------------
# A function that runs on whole tensors.


class _Gathered:
    """The whole tensor of a DTensor, for a function that runs on it, and for views of it that live on."""

    def __init__(self, tensor: Any) -> None:
        if traces_for_script():
            raise SPMDError(
                "torch.jit traces a model whose parameters rest as DTensors.",
                remedy="Trace it before the first call, or trace a plain model that has loaded its weights.",
            )
        self.tensor, self.local = tensor, local_tensor(tensor)
        takes_gradient = tensor.requires_grad and torch.is_grad_enabled()
        # A tensor of inference mode would not count its writes.
        with torch.inference_mode(False):
            self.whole: torch.Tensor = _WithGradient.apply(tensor) if takes_gradient else _gather(tensor)  # type: ignore[no-untyped-call]
        # A replicated tensor is its own part.
        self.is_own = storage_key(self.whole) == storage_key(self.local)
        self._note()

    def _note(self) -> None:
        self._version, self._of_rows = version_of(self.whole), (version_of(self.local), _Rows.writes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather again, if rows have been written since."""
        if not self.is_own and self._of_rows != (version_of(self.local), _Rows.writes):
            with torch.inference_mode(False):
                self.whole.detach().copy_(_gather(self.tensor))
            self._note()

    @torch.no_grad()
    def write_back(self) -> None:
        """Keep the rank's rows, if the function has changed the whole tensor."""
        if not self.is_own and self._version != version_of(self.whole):
            self.local.copy_(part_of(self.tensor, self.whole.detach()))
            note_write_of_rows()
            self._note()


class _WholeRun:
    """A function that runs on whole tensors in the place of DTensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any, views: Any = ()) -> None:
        self._func, self._args, self._kwargs, self._views = func, args, kwargs, views
        self._gathered: dict[int, _Gathered] = {}

    def result(self) -> Any:
        """Run the function. What it returns of its arguments are the DTensors themselves."""
        func = torch.Tensor.unbind if self._func is torch.Tensor.__iter__ else self._func
        for view in self._views:
            view.refresh()
        result = func(*_mapped(self._args, self._whole), **_mapped(self._kwargs, self._whole))
        everything = [*self._gathered.values(), *self._views]
        for gathered in everything:
            gathered.write_back()
        by_identity: dict[int, torch.Tensor] = {}
        for gathered in self._gathered.values():
            by_identity[id(gathered.whole)] = gathered.tensor
        by_storage = {storage_key(gathered.whole): gathered for gathered in everything if not gathered.is_own}

        def outward(value: torch.Tensor) -> torch.Tensor:
            if id(value) in by_identity:
                return by_identity[id(value)]
            if type(value) in (torch.Tensor, ViewOfWhole) and value.layout is torch.strided:
                gathered = by_storage.get(storage_key(value))
                if gathered is not None:
                    value.__class__ = ViewOfWhole
                    value._gathered = gathered  # type: ignore[attr-defined]
            return value

        result = _mapped(result, outward)
        return iter(result) if func is not self._func else result

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        if id(value) not in self._gathered:
            self._gathered[id(value)] = _Gathered(value)
        return self._gathered[id(value)].whole


class _WithGradient(torch.autograd.Function):
    """Gathers a tensor. A backward leaves it the mean of the ranks' gradients, as DDP and FSDP do."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.rows = tensor.device_mesh, tensor.placements, local_tensor(tensor)
        whole = _gather(tensor.detach())
        return whole.view_as(whole) if whole is local_tensor(tensor) else whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not backward_accumulates():
            raise SPMDError(
                "torch.autograd.grad was called outside of the compiled step for a parameter that rests as a DTensor.",
                remedy="Call it in the step, or call backward().",
            )
        managed = in_call.get(storage_key(ctx.rows))
        if managed is not None:
            raise SPMDError(
                f"A backward of the step reached parameter {managed.name} through an operation between calls.",
                remedy="Compute it in the step, or detach it.",
            )
        gradient = gradient.contiguous() / ctx.mesh.size()
        partial = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        return rest_as(partial.redistribute(placements=ctx.placements))


@torch.no_grad()
def _gather(tensor: Any) -> torch.Tensor:
    """The whole tensor, of a replicated one its own memory."""
    local, mesh = local_tensor(tensor), tensor.device_mesh
    if tensor.placements == (Replicate(),):
        return local
    if tensor.placements != (Shard(0),):
        other: torch.Tensor = tensor.detach().full_tensor()
        return other
    # By no function of autograd, which torch.func could not transform.
    chunk = -(-tensor.shape[0] // mesh.size())
    mine = local.new_zeros((chunk, *local.shape[1:]))
    mine[: len(local)].copy_(local)
    everything = local.new_empty((mesh.size() * chunk, *local.shape[1:]))
    gather_into(as_real(everything.view(-1)), as_real(mine.view(-1)), mesh.get_group()).wait()
    whole = everything[: tensor.shape[0]]
    if whole.stride() != tensor.stride():
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device).copy_(whole)
    return whole


def part_of(like: Any, whole: torch.Tensor) -> torch.Tensor:
    """The part that this rank has of a whole tensor which is placed like a DTensor."""
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return local_tensor(placed)


# --------------------------------------------------------------------------------------------------------------------
# Functions that have a meaning of their own.


def _slot(name: str) -> Any:
    """The descriptor of an attribute of tensors."""
    return inspect.getattr_static(torch.Tensor, name)


def _set_data(tensor: Any, value: Any) -> None:
    _refuse_in_call((tensor,), {})
    if not isinstance(value, DTensor):
        if value.shape != tensor.shape:
            raise SPMDError(
                f"The data of a parameter of shape {tuple(tensor.shape)} is set to one of shape {tuple(value.shape)} "
                "between calls.",
                remedy="Set it in the step or before the first call.",
            )
        value = resting_like(tensor, part_of(tensor, value.detach()).clone())
    if value.placements != tensor.placements:
        value = value.redistribute(placements=tensor.placements)
    if value.dtype != tensor.dtype:
        _slot("data").__set__(tensor, value)
    set_local_tensor(tensor, local_tensor(value))
    note_write_of_rows()


def _set_gradient(tensor: Any, value: torch.Tensor | None) -> None:
    if value is not None and not isinstance(value, DTensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        value = resting_like(tensor, part_of(tensor, dense).clone())
    _slot("grad").__set__(tensor, value)


_SETTERS: dict[str, Callable[..., Any]] = {"data": _set_data, "grad": _set_gradient}


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment.")
    copied = resting_like(tensor, local_tensor(tensor).clone())
    copied.requires_grad_(tensor.requires_grad)
    copied.__dict__.update(deepcopy(_attributes(tensor), memo))
    if tensor.grad is not None:
        copied.grad = deepcopy(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def _reduce(tensor: Any, protocol: int) -> Any:
    """Pickle a DTensor, as every program can load it."""
    plain = dtensor_like(tensor, local_tensor(tensor))
    plain.requires_grad_(tensor.requires_grad)
    plain.__dict__.update(_attributes(tensor))
    return plain.__reduce_ex__(protocol)


def _repr(tensor: Any, **options: Any) -> str:
    """The rank's rows, as of any DTensor: a rank may print alone."""
    return f"DTensor(local_tensor={local_tensor(tensor)}, placements={tensor.placements})"


def _format(tensor: Any, spec: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)


def _attributes(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in tensor.__dict__.items() if name != RECORD}


_OWN: dict[str, Callable[..., Any]] = {
    "__deepcopy__": _deepcopy,
    "__reduce_ex__": _reduce,
    "__repr__": _repr,
    "__format__": _format,
}


def _refuse_in_call(args: Any, kwargs: Any) -> None:
    """Refuse the rows of a parameter that a call has whole: they are those of the call before."""
    if not in_call:
        return
    for value in tensors_in((args, kwargs)):
        managed = in_call.get(storage_key(local_tensor(value))) if isinstance(value, DTensor) else None
        if managed is not None:
            raise SPMDError(
                f"An operation in the step uses a DTensor of parameter {managed.name} from between calls, which the "
                "model does not use in a call.",
                remedy="Take it from the model in the step.",
            )


def _allow_swap(name: str, tensor: Any, converted: Any) -> None:
    """Prepare a parameter for `module.to()` and the like, which swap it with a detached result of a conversion."""
    if name not in _CONVERSIONS or not isinstance(converted, RestingTensor):
        return
    managed = managed_by(tensor)
    if managed is not None and name != "detach":
        managed.allow_swap()
    if RECORD in tensor.__dict__:
        converted.__dict__[RECORD] = tensor.__dict__[RECORD]


# --------------------------------------------------------------------------------------------------------------------
# Arguments and results.


def _has_plain(name: str, args: Any, kwargs: Any) -> bool:
    """Is a plain tensor among the arguments? Rows may be changed by one without dimensions, such as a learning rate."""
    plain = [value for value in tensors_in((args, kwargs)) if not isinstance(value, DTensor)]
    if not plain:
        return False
    updates_rows = _writes(name) and isinstance(next(tensors_in(args), None), DTensor)
    return not updates_rows or any(value.dim() > 0 for value in plain)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with other tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(inner, function) for inner in value))
    if type(value) in (tuple, list):
        return type(value)(_mapped(inner, function) for inner in value)
    if isinstance(value, tuple):
        # Results of torch, such as torch.return_types.max.
        return type(value)([_mapped(inner, function) for inner in value])
    if type(value) is dict:
        return {key: _mapped(inner, function) for key, inner in value.items()}
    return value
