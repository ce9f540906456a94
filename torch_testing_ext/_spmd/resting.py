"""Parameters between calls: DTensors, which modules and optimizers hold in place of the plain parameters of a call."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from torch_testing_ext._torch.training import (
    MemoryReference,
    dtensor_like,
    holders_of_memory,
    local_tensor,
    set_local_tensor,
    storage_key,
)

from .agreement import StepMeeting
from .averaging import Averager
from .layout import Rows
from .modes import SPMDError
from .row_tensor import Gather, RowTensor, gather_rows
from .state_finding import FoundState


@dataclass
class TwoForms:
    """The two forms of a parameter."""

    # In a call. Between calls a sharded one has no values.
    plain: Any
    # Between calls: a parameter that is a DTensor. None before the end of the first call.
    rest: Any
    # None if it is replicated.
    rows: Rows | None
    name: str
    # In a call: the local tensor of `rest`, to which the rows return, if something else holds its memory.
    local: torch.Tensor | None = None
    # Between calls: the identity of what `rest` has outside, which `.data =` replaces, and of its local tensor.
    outer: tuple[int, int] | None = None
    # The memory of the parameter and of its whole gradient in the last call, which something may have kept.
    memory: MemoryReference | None = None
    memory_of_gradient: MemoryReference | None = None

    def local_of(self, value: DTensor) -> torch.Tensor:
        """The local tensor of a gradient or a state between calls."""
        placements = [Replicate() if self.rows is None else Shard(0)]
        return local_tensor(
            value if list(value.placements) == placements else value.redistribute(placements=placements)
        )

    def whole_state(self, value: Any) -> bool:
        """Whether this is a whole tensor of an optimizer's state, with an element for each of the parameter."""
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, (DTensor, RowTensor))
        return is_plain and value.layout is torch.strided and value.dim() > 0 and value.shape == self.plain.shape


class Resting:
    """The pairs of all modules, and the change from one form to the other."""

    def __init__(self, meeting: StepMeeting, averager: Averager) -> None:
        self.meeting, self.averager = meeting, averager
        # By the name in the module, which keeps them alive.
        self._of_modules: weakref.WeakKeyDictionary[nn.Module, dict[str, TwoForms]] = weakref.WeakKeyDictionary()
        # The pairs that optimizers hold, also when no module does any more.
        self._of_optimizers: weakref.WeakKeyDictionary[Optimizer, list[TwoForms]] = weakref.WeakKeyDictionary()
        # The pairs of the call, by `id` of the plain parameter.
        self.pairs: dict[int, TwoForms] = {}
        # Whether the plain parameters have their values.
        self.is_filled = False
        # A parameter whose DTensor got a gradient in the call.
        self._reached: str | None = None
        self._mesh: DeviceMesh | None = None

    # -- into a call

    def enter(self, found: FoundState) -> None:
        """Let modules and optimizers hold plain parameters, which have no values yet."""
        self.pairs, self.is_filled = {}, False
        by_rest: dict[int, TwoForms] = {}
        for module in _modules(found.modules):
            for pair in self._of_modules.get(module, {}).values():
                by_rest[id(pair.rest)] = pair
        for optimizer in found.optimizers:
            for pair in self._of_optimizers.get(optimizer, ()):
                by_rest[id(pair.rest)] = pair
        for module in _modules(found.modules):
            for name, param in list(module._parameters.items()):
                if isinstance(param, DTensor):
                    pair = by_rest.get(id(param))
                    if pair is None:
                        pair = by_rest[id(param)] = self._adopt(name, param)
                    self._of_modules.setdefault(module, {})[name] = pair
                    self._enter_pair(pair)
                    _put(module, name, pair.plain)
        _refuse_held(found, by_rest)
        for optimizer in found.optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if isinstance(param, DTensor):
                    pair = by_rest.get(id(param)) or self._adopt("of an optimizer", param)
                    by_rest[id(param)] = pair
                    self._enter_pair(pair)
            _rekey(optimizer, lambda param: by_rest[id(param)].plain if id(param) in by_rest else param)

    def _adopt(self, name: str, rest: Any) -> TwoForms:
        """The pair of a DTensor that no call has made, such as that of a copied or loaded model."""
        local = local_tensor(rest)
        is_sharded = rest.placements[0].is_shard()
        plain = nn.Parameter(_nowhere(rest) if is_sharded else local.detach(), requires_grad=rest.requires_grad)
        return TwoForms(plain, rest, self._rows(rest) if is_sharded else None, name)

    def _rows(self, param: torch.Tensor) -> Rows:
        return Rows(len(param), self.meeting.rank, self.meeting.world)

    def _enter_pair(self, pair: TwoForms) -> None:
        plain, rest = pair.plain, pair.rest
        if id(plain) in self.pairs:
            return
        if pair.outer is not None and pair.outer[0] != storage_key(rest) and pair.outer[1] == id(local_tensor(rest)):
            raise SPMDError(
                f"Parameter {pair.name} was given another .data between calls, which a DTensor does not take.",
                remedy="Use param.copy_(value) under no_grad, or set it in the step.",
            )
        self.pairs[id(plain)] = pair
        pair.local = local_tensor(rest)
        if pair.rows is None:
            plain.data = pair.local.detach()
        else:
            _refuse_written(pair)
            if plain.dtype != rest.dtype or plain.shape != rest.shape:
                pair.rows = self._rows(rest)
                plain.data = _nowhere(rest)
            set_local_tensor(rest, _nowhere(pair.local))
        plain.requires_grad_(rest.requires_grad)
        plain.__dict__.update({key: value for key, value in rest.__dict__.items() if key not in _OF_DTENSORS})

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the values of sharded parameters, and take over gradients of earlier calls."""
        gathers = []
        for pair in self.pairs.values():
            if pair.rows is not None and pair.local is not None:
                like, dtype, device = pair.plain, pair.local.dtype, pair.local.device
                whole = None if pair.memory is None else pair.memory.tensor(like.shape, pair.rest.stride(), dtype)
                if whole is None:
                    whole = torch.empty_strided(like.shape, pair.rest.stride(), dtype=dtype, device=device)
                gathers.append((pair, Gather(pair.rows, pair.local, whole)))
        gather_rows(self.meeting, [gather for _, gather in gathers])
        for pair, gather in gathers:
            pair.plain.data = gather.whole
            if holders_of_memory(gather.mine) == 1:
                pair.local = None
        for pair in self.pairs.values():
            if pair.rest is not None:
                self._enter_gradient(pair)
        self.is_filled = True
        if any(
            pair.memory_of_gradient is not None and pair.memory_of_gradient.is_alive for pair in self.pairs.values()
        ):
            # What something has kept of gradients goes on to show them.
            self.averager.gradients.read()

    def _enter_gradient(self, pair: TwoForms) -> None:
        grad, pair.rest.grad = pair.rest.grad, None
        pair.plain.grad = None
        if grad is None:
            return
        if isinstance(grad, DTensor):
            grad = pair.local_of(grad)
        if pair.rows is None:
            pair.plain.grad = grad
        else:
            self.averager.gradients.add(pair.plain, pair.rows, grad)
            pair.plain.grad.memory = pair.memory_of_gradient

    def take_over(self, module: nn.Module, name: str, param: torch.Tensor, rows: Rows | None, title: str) -> None:
        """Let a parameter that is new be a DTensor after this call."""
        pair = self.pairs.get(id(param))
        if pair is None:
            pair = self.pairs[id(param)] = TwoForms(param, None, rows, title)
        self._of_modules.setdefault(module, {})[name] = pair

    # -- out of a call

    @torch.no_grad()
    def leave(self, found: FoundState) -> None:
        """Let modules and optimizers hold DTensors, with the values of now."""
        pairs, self._reached = self.pairs, None
        for pair in pairs.values():
            if pair.rest is not None and pair.rest.grad is not None and self.is_filled:
                self._reached = pair.name
            self._leave_pair(pair)
        for module in _modules(found.modules):
            for name, param in list(module._parameters.items()):
                pair_ = pairs.get(id(param))
                if pair_ is not None:
                    self._of_modules.setdefault(module, {})[name] = pair_
                    _put(module, name, pair_.rest)
        for optimizer in found.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._of_optimizers[optimizer] = [pairs[id(param)] for param in params if id(param) in pairs]
            _rekey(optimizer, lambda param: pairs[id(param)].rest if id(param) in pairs else param)
        for pair in pairs.values():
            if pair.rows is not None:
                self._forget_whole(pair)
        self.pairs = {}

    def _forget_whole(self, pair: TwoForms) -> None:
        """Free the memory of a whole parameter and its gradient. If something keeps it, the next call uses it again."""
        plain, grad = pair.plain, pair.plain.grad
        if self.is_filled:
            whole = grad.whole if isinstance(grad, RowTensor) else grad
            has_memory = whole is not None and whole.layout is torch.strided and not isinstance(whole, RowTensor)
            pair.memory = MemoryReference(plain)
            pair.memory_of_gradient = MemoryReference(whole) if whole is not None and has_memory else None
        plain.grad = None
        plain.data = _nowhere(plain)

    def refuse_reached(self) -> None:
        """Raise an error if a backward of the call has reached a DTensor."""
        if self._reached is not None:
            raise SPMDError(
                f"A backward of the step reached parameter {self._reached} through an operation between calls.",
                remedy="Compute it in the step, or detach it.",
            )

    def _leave_pair(self, pair: TwoForms) -> None:
        plain, rest, local = pair.plain, pair.rest, pair.local
        pair.local = None
        if rest is not None and not self.is_filled:
            if local is not None:
                set_local_tensor(rest, local)
            return
        data = plain.detach()
        rows = pair.rows = None if pair.rows is None else self._rows(data)
        mine = data if rows is None else rows.of(data)
        kind = (data.shape, data.dtype, data.device)
        if rest is None or kind != (rest.shape, rest.dtype, rest.device):
            pair.rest = rest = self._new_rest(plain, mine, rows)
        elif rows is not None:
            set_local_tensor(rest, _own(mine) if local is None else local.copy_(mine))
        elif local is not None and local.data_ptr() != mine.data_ptr():
            set_local_tensor(rest, mine)
        rest.requires_grad_(plain.requires_grad)
        rest.__dict__.update(plain.__dict__)
        pair.outer = storage_key(rest), id(local_tensor(rest))
        self._leave_gradient(pair, rest)

    def _leave_gradient(self, pair: TwoForms, rest: Any) -> None:
        grad: Any = pair.plain.grad
        rest.grad = None
        if isinstance(grad, RowTensor) and grad.whole is None:
            # None if an error has interrupted its average.
            mine = grad.mine
        elif grad is None:
            mine = None
        else:
            values = grad.values() if isinstance(grad, RowTensor) else grad
            dense = values.detach() if values.layout is torch.strided else values.detach().to_dense()
            mine = dense if pair.rows is None else pair.rows.of(dense).clone()
        if mine is not None:
            # torch cannot copy a DTensor whose part begins within other memory.
            rest.grad = dtensor_like(rest, _own(mine) if mine.storage_offset() else mine)

    def _new_rest(self, plain: torch.Tensor, mine: torch.Tensor, rows: Rows | None) -> Any:
        local = mine if rows is None else _own(mine)
        placements = [Replicate() if rows is None else Shard(0)]
        return nn.Parameter(_dtensor(local, self.mesh(plain), placements, plain), requires_grad=plain.requires_grad)

    def mesh(self, like: torch.Tensor) -> DeviceMesh:
        """The mesh of all ranks."""
        if self._mesh is None:
            self._mesh = init_device_mesh(like.device.type, (self.meeting.world,))
        return self._mesh

    def state_at_rest(self, pair: TwoForms, value: Any) -> Any:
        """A value of an optimizer's state as a DTensor, if it has an element for each of the parameter."""
        if not pair.whole_state(value):
            return value
        return self.state_of_rows(pair, value if pair.rows is None else pair.rows.of(value).clone())

    def state_of_rows(self, pair: TwoForms, mine: torch.Tensor) -> Any:
        """A DTensor with this local tensor."""
        if pair.rest is not None and pair.rest.shape == pair.plain.shape:
            return dtensor_like(pair.rest, mine)
        placements = [Replicate() if pair.rows is None else Shard(0)]
        return _dtensor(mine, self.mesh(pair.plain), placements, pair.plain)


# What is in the `__dict__` of a DTensor parameter.
_OF_DTENSORS = ("_is_param", "_spec", "_local_tensor")


def _modules(roots: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for root in roots:
        yield from root.modules()


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Any, like: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _own(rows: torch.Tensor) -> torch.Tensor:
    """A copy of rows, without the rest of the whole."""
    return rows.clone(memory_format=torch.contiguous_format)


def _nowhere(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory of its own. It is NaN, and cannot be written to."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    local = local_tensor(like) if isinstance(like, DTensor) else like
    return torch.full((), value, dtype=local.dtype, device=local.device).expand(like.shape)


def _refuse_written(pair: TwoForms) -> None:
    """Refuse what has been written to a plain parameter between calls, when it has no values."""
    plain = pair.plain.detach()
    if plain.is_floating_point() and plain.numel() and not plain.as_strided((), ()).isnan():
        raise SPMDError(
            f"Something has written to parameter {pair.name} between calls, by an object that was taken before the "
            "first call or in a step.",
            remedy="Take the parameter from the model, where it is a DTensor between calls.",
        )


def _put(module: nn.Module, name: str, value: Any) -> None:
    """Register a parameter, also in the second list of weights that recurrent modules keep."""
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]


def _refuse_held(found: FoundState, by_rest: dict[int, TwoForms]) -> None:
    for tensor in found.tensors:
        pair = by_rest.get(id(tensor))
        if pair is not None:
            raise SPMDError(
                f"A list, a dict, an argument or an attribute is or holds the DTensor of parameter {pair.name}, which "
                "the model does not use in a call.",
                remedy="Make it before the first call or in the step.",
            )


def _rekey(optimizer: Optimizer, form: Callable[[Any], Any]) -> None:
    """Put another form of each parameter into an optimizer, in its groups and as keys of its state."""
    for group in optimizer.param_groups:
        group["params"][:] = [form(param) for param in group["params"]]
    items = [(form(key), value) for key, value in optimizer.state.items()]
    for _, values in items:
        if isinstance(values, dict):
            values.update({name: form(value) for name, value in values.items() if isinstance(value, nn.Parameter)})
    optimizer.state.clear()
    optimizer.state.update(items)
