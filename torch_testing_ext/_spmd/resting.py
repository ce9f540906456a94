"""The two forms of a parameter: plain in a call, a DTensor between calls, which modules and optimizers hold in turn."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_testing_ext._torch import module_parts
from torch_testing_ext._torch.training import (
    MemoryReference,
    holders_of_memory,
    local_tensor,
    set_local_tensor,
)

from .admission import Named
from .agreement import StepMeeting
from .averaging import backward_after_call
from .layout import Gather, Rows, gather_rows
from .resting_tensor import AwayParameter, RestingTensor, at_rest
from .state_finding import FoundState


@dataclass
class TwoForms:
    """The two forms of a parameter."""

    # The parameter in a call: plain.
    plain: Any
    # The parameter between calls: a DTensor. None before the end of the first call.
    rest: Any
    # None if it is replicated.
    rows: Rows | None
    name: str
    # The class of the plain parameter in a call.
    kind: type = nn.Parameter
    # In a call: the local tensor of `rest`, to which the rows return, if something else holds its memory.
    local: torch.Tensor | None = None
    # Between calls: the memory of `rest`, and the writes to it.
    written: tuple[Any, int] | None = None
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
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        return is_plain and value.layout is torch.strided and value.dim() > 0 and value.shape == self.plain.shape


class Resting:
    """The pairs of a call, and the change from one form to the other."""

    def __init__(self, meeting: StepMeeting) -> None:
        self.meeting = meeting
        # The pairs by `id` of the plain parameter.
        self.pairs: dict[int, TwoForms] = {}
        # Whether the plain parameters have their values.
        self.is_filled = False
        self._mesh: DeviceMesh | None = None

    def enter(self, found: FoundState, params: Sequence[Named]) -> list[Named]:
        """Let modules and optimizers hold plain parameters, which have no values yet. Returns these."""
        self.pairs, self.is_filled = {}, False
        plain: dict[int, Any] = {}
        for name, param in params:
            rest = at_rest(param)
            if isinstance(rest, DTensor):
                plain[id(rest)] = self._plain(name, rest)
        _exchange(found, plain)
        entered: dict[int, Named] = {}
        for name, param in params:
            param = plain.get(id(at_rest(param)), param)
            entered.setdefault(id(param), (name, param))
        return [*entered.values()]

    def _plain(self, name: str, param: DTensor) -> Any:
        """The plain form of a parameter, which enters the call."""
        pair = param.pair if isinstance(param, RestingTensor) else None
        if pair is None or pair.rest is not param:
            pair = self._adopt(name, param)
        if id(pair.plain) not in self.pairs:
            self._enter_pair(pair)
        return pair.plain

    def _adopt(self, name: str, dtensor: DTensor) -> TwoForms:
        """The pair of a DTensor that no call has made, such as that of a copied or loaded model."""
        rest: Any = dtensor if isinstance(dtensor, RestingTensor) else RestingTensor.of(dtensor)
        local, trains = local_tensor(dtensor), dtensor.requires_grad
        is_sharded = dtensor.placements[0].is_shard()
        plain = nn.Parameter(_nowhere(dtensor) if is_sharded else local.detach(), requires_grad=trains)
        rest.requires_grad_(trains)
        rest.grad = dtensor.grad
        module_parts.count_as_parameter(rest, True)
        pair = rest.pair = TwoForms(plain, rest, self._rows(dtensor) if is_sharded else None, name)
        return pair

    def _rows(self, param: torch.Tensor) -> Rows:
        return Rows(len(param), self.meeting.rank, self.meeting.world)

    def _enter_pair(self, pair: TwoForms) -> None:
        plain, rest = pair.plain, pair.rest
        self.pairs[id(plain)] = pair
        object.__setattr__(plain, "__class__", pair.kind)
        plain.__dict__.clear()
        late, plain.grad = plain.grad, None
        if late is not None and self.meeting.world == 1:
            # With more ranks, the hook has raised it.
            raise backward_after_call()
        pair.local = local_tensor(rest)
        if pair.rows is None:
            plain.data = pair.local.detach()
        else:
            if plain.dtype != rest.dtype or plain.shape != rest.shape:
                pair.rows = self._rows(rest)
                plain.data = _nowhere(rest)
            set_local_tensor(rest, _nowhere(pair.local))
        rest.is_away = True
        plain.requires_grad_(rest.requires_grad)
        plain.__dict__.update(rest.__dict__)
        module_parts.count_as_parameter(plain, False)

    def about(self) -> int:
        """A hash of the gradients of earlier calls."""
        return hash(tuple(pair.rest.grad is not None for pair in self.pairs.values())) % (1 << 62)

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the values of sharded parameters, and the gradients that earlier calls have left."""
        values, gradients = [], []
        for pair in self.pairs.values():
            if pair.rows is not None:
                assert pair.local is not None
                whole, is_kept = self._memory(pair, pair.memory, pair.local)
                if is_kept and pair.written == (pair.rest.memory, pair.rest.memory.writes):
                    # What keeps it may have written to it.
                    pair.local.copy_(pair.rows.of(whole))
                # Before the gather, which holds it for a while.
                is_free = holders_of_memory(pair.local) == 1
                values.append((pair, Gather(pair.rows, pair.local, whole), is_free))
        gather_rows(self.meeting.group, [gather for _, gather, _ in values])
        while values:
            pair, gather, is_free = values.pop()
            pair.plain.data = gather.whole
            if is_free:
                pair.local = None
        for pair in self.pairs.values():
            grad, pair.rest.grad = pair.rest.grad, None
            if grad is not None:
                mine = pair.local_of(grad) if isinstance(grad, DTensor) else grad
                pair.plain.grad = mine if pair.rows is None else self._memory(pair, pair.memory_of_gradient, mine)[0]
                if pair.rows is not None:
                    gradients.append(Gather(pair.rows, mine, pair.plain.grad))
        gather_rows(self.meeting.group, gradients)
        self.is_filled = True

    def _memory(
        self, pair: TwoForms, reference: MemoryReference | None, like: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        """A whole tensor for the values of a parameter or its gradient: that of the last call if something keeps it."""
        shape, stride = pair.plain.shape, pair.rest.stride()
        kept = None if reference is None else reference.tensor(shape, stride, like.dtype)
        if kept is not None:
            return kept, True
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device), False

    def take_over(self, name: str, param: torch.Tensor, is_sharded: bool) -> None:
        """Let a parameter that is new be a DTensor after this call."""
        self.pairs[id(param)] = TwoForms(param, None, self._rows(param) if is_sharded else None, name)

    @torch.no_grad()
    def leave(self, found: FoundState) -> None:
        """Let modules and optimizers hold DTensors, with the values of now."""
        pairs = self.pairs
        for pair in pairs.values():
            self._leave_pair(pair)
            self._free(pair)
        _exchange(found, {key: pair.rest for key, pair in pairs.items()})
        for pair in pairs.values():
            plain = pair.plain
            pair.kind = type(plain)
            plain.__dict__.clear()
            plain.__dict__["_pair"] = pair
            plain.__class__ = AwayParameter
        self.pairs = {}

    def _free(self, pair: TwoForms) -> None:
        """Free the memory of a whole parameter and its gradient. If something keeps it, the next call uses it again."""
        if self.is_filled and pair.rows is not None:
            pair.memory = MemoryReference.of_kept(pair.plain)
            pair.memory_of_gradient = MemoryReference.of_kept(pair.plain.grad)
        pair.plain.grad = None
        if pair.rows is not None:
            pair.plain.data = _nowhere(pair.plain)

    def _leave_pair(self, pair: TwoForms) -> None:
        plain, rest, local = pair.plain, pair.rest, pair.local
        pair.local = None
        if rest is not None:
            rest.is_away = False
            if not self.is_filled:
                if local is not None:
                    set_local_tensor(rest, local)
                return
        data = plain.detach()
        rows = pair.rows = None if pair.rows is None else self._rows(data)
        mine = data if rows is None else rows.of(data)
        kind = (data.shape, data.dtype, data.device)
        if rest is None or kind != (rest.shape, rest.dtype, rest.device):
            pair.rest, local = None, mine if rows is None else _own(mine)
            pair.rest = rest = self.resting(pair, local)
            rest.pair = pair
        elif rows is not None:
            set_local_tensor(rest, _own(mine) if local is None else local.copy_(mine))
        elif local is not None and local.data_ptr() != mine.data_ptr():
            set_local_tensor(rest, mine)
        rest.memory.writes += 1
        pair.written = rest.memory, rest.memory.writes
        rest.requires_grad_(plain.requires_grad)
        rest.__dict__.clear()
        rest.__dict__.update(plain.__dict__)
        module_parts.count_as_parameter(rest, True)
        self._leave_gradient(pair, rest)

    def _leave_gradient(self, pair: TwoForms, rest: Any) -> None:
        grad = pair.plain.grad
        rest.grad = None
        if grad is not None:
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            mine = dense if pair.rows is None else pair.rows.of(dense).clone()
            # torch cannot copy a DTensor whose part begins within other memory.
            rest.grad = RestingTensor.of(rest, _own(mine) if mine.storage_offset() else mine)

    def resting(self, pair: TwoForms, local: torch.Tensor) -> Any:
        """A DTensor of the parameter's shape with this local tensor."""
        plain = pair.plain
        if pair.rest is not None and pair.rest.shape == plain.shape:
            return RestingTensor.of(pair.rest, local)
        if self._mesh is None:
            self._mesh = init_device_mesh(plain.device.type, (self.meeting.world,))
        placements, shape, stride = [Replicate() if pair.rows is None else Shard(0)], plain.shape, plain.stride()
        made = DTensor.from_local(local, self._mesh, placements, run_check=False, shape=shape, stride=stride)
        # Its own local tensor is a view, whose base would count as another holder of the memory.
        return RestingTensor.of(made, local)


def _exchange(found: FoundState, forms: Mapping[int, Any]) -> None:
    """Put other forms of parameters, by the `id` of those of now, into modules and optimizers."""

    def form(param: Any) -> Any:
        return forms.get(id(at_rest(param)), param)

    for module in itertools.chain.from_iterable(root.modules() for root in found.modules):
        for name, param in list(module_parts.own_parameters(module).items()):
            if form(param) is not param:
                module_parts.put_parameter(module, name, form(param))
    for optimizer in found.optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = map(form, group["params"])
        items = [(form(key), value) for key, value in optimizer.state.items()]
        for _, values in items:
            if isinstance(values, dict):
                values.update({name: form(value) for name, value in values.items()})
        optimizer.state.clear()
        # A look-up by a parameter of before the first call has left an empty one.
        optimizer.state.update((key, values) for key, values in items if values or key not in optimizer.state)


def _own(rows: torch.Tensor) -> torch.Tensor:
    """A copy of rows, without the rest of the whole."""
    return rows.clone(memory_format=torch.contiguous_format)


def _nowhere(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory of its own."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    local = local_tensor(like) if isinstance(like, DTensor) else like
    return torch.full((), value, dtype=local.dtype, device=local.device).expand(like.shape)
