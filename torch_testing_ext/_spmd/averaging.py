"""Averages gradients in every backward: the place where ranks meet, and a watch on reads that come too early."""

import enum
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch.tensors.nested_tensors import tensors_in
from torch_testing_ext._torch.tracing import (
    at_end_of_backward,
    disable_torch_function,
    meets_all,
    outside_dynamo,
    put_function_mode,
    roots_of_backward,
    storage_key,
)

from .gradient_buckets import BackwardPlan, BucketProgress, ManagedParam, Wire, agreed_order, managed_by, mark_work
from .parallel_modes import SPMDError
from .roster import READS_KEPT, READS_UPDATED, Roster

# --------------------------------------------------------------------------------------------------------------------
# The place where ranks compare their headers: once per call, and before a backward that they have not planned.
#
# A header is a few numbers, always as many: ranks that do different things meet here, and not in collectives that do
# not fit together. A step whose gradients are planned sends a hash of its header with the first bucket, which costs
# nothing; others send the header before anything else. If hashes differ, all ranks send their headers, and know why.

# The places of backwards that run after a call.
_AFTER = 1000


class CallHeader(NamedTuple):
    """One rank's view of the call that it is in."""

    # The compiled step, in the order of their first calls.
    step: int = 0
    call: int = 0
    # 0: when the call begins; n: before its n-th backward; LEAVING: after it.
    place: int = 0
    # The number of parameters and optimizers that the call found for the first time.
    new: int = 0
    params: int = 0
    refused: int = 0
    checksum: int = 0
    # Bits: the rank reads what is gathered on request, or asks to verify; may differ.
    reads: int = 0
    # Of a captured step.
    program: int = 0


LEAVING = -1


def disagreement(headers: Sequence[Sequence[int]]) -> tuple[str, str] | None:
    """The problem and its remedy, if the ranks' headers differ or if one of them announces an error."""
    ranks = [CallHeader(*numbers) for numbers in headers]
    for rank, header in enumerate(ranks):
        if header.refused:
            return f"Rank {rank} refused the step: see its error.", "Fix the step or its arguments on that rank."
    first = ranks[0]
    for rank, header in enumerate(ranks[1:], 1):
        difference = _difference(first, header, rank)
        if difference is not None:
            return difference
    return None


def _no_checksum() -> None:
    return None


def _difference(first: CallHeader, other: CallHeader, rank: int) -> tuple[str, str] | None:
    """The first difference between the headers of rank 0 and another rank, with its remedy."""
    same_calls = "Call the same steps on every rank, and as many backwards in each of them."
    if first.step != other.step:
        return f"Rank 0 is in compiled step {first.step}, rank {rank} in step {other.step}.", same_calls
    if (first.call, first.place, other.place) == (other.call, LEAVING, LEAVING) and first.params != other.params:
        return (
            f"Optimizers updated rows of {first.params} parameters on rank 0, and of {other.params} on rank {rank}.",
            "Let them step on every rank, or on none.",
        )
    leaves = LEAVING in (first.place, other.place)
    if first.call == other.call and not leaves and (first.new, first.params) != (other.new, other.params):
        return (
            f"Rank 0 has {first.params} parameters ({first.new} new objects), "
            f"rank {rank} has {other.params} ({other.new}).",
            "Build and change the same model and optimizers on every rank, in the same calls.",
        )
    if (first.call, first.place) != (other.call, other.place):
        where = {0: "at the start", LEAVING: "at the end"}
        places = " and ".join(
            f"{where.get(h.place, f'in backward {h.place}')} of call {h.call} (rank {r})"
            for r, h in ((0, first), (rank, other))
        )
        return f"The ranks ran different numbers of calls or backwards: they are {places}.", same_calls
    if first.program != other.program:
        return (
            f"Rank 0 and rank {rank} run different programs of a captured step.",
            "Let the step take the same branch on every rank, with the same settings and the same gradients on entry; "
            'or drop backend="capture".',
        )
    if first.checksum != other.checksum:
        return (
            f"The parameters of rank {rank} differ from those of rank 0.",
            "Let every update use averaged gradients: those of backward(), of modules and optimizers that the step's "
            "arguments, closure or globals hold. Average others, such as those of torch.autograd.grad, in the step.",
        )
    return None


class MeetingPoint:
    """Exchanges headers with the other ranks."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.device = torch.device("cpu")
        self.header = CallHeader()
        # Whose first bucket opens the call.
        self.plan: BackwardPlan | None = None
        # Of any rank, as told by the last headers.
        self.reads = 0
        self._checksum: Callable[[], torch.Tensor | None] = _no_checksum
        # Waits for the headers that are on their way.
        self._pending: Callable[[], list[list[int]]] | None = None
        self._has_met = False

    def begin(
        self,
        header: CallHeader,
        device: torch.device,
        checksum: Callable[[], torch.Tensor | None],
        plan: BackwardPlan | None,
    ) -> None:
        """Begin a call: its first meeting is due."""
        self.header, self.device, self._checksum, self.plan = header, device, checksum, plan
        self._pending, self._has_met = None, False

    def meet(self, checksum: bool = True) -> None:
        """Meet now, if this call has not."""
        if self._has_met or self.wire.world == 1:
            self.check()
            return
        if not checksum:
            self._checksum = _no_checksum
        self._stamp()
        self._contact()

    def arrive(self) -> None:
        """Send this rank's header, if the call has not yet and will not with a bucket, and do not wait."""
        if not self._has_met and self.plan is None and self.wire.world > 1:
            self._stamp()
            self._send()

    def hash(self, place: int, phase: str) -> int:
        """The hash of this rank's header, to be sent with the first bucket of a backward."""
        if not self._has_met:
            self._stamp()
        self.header = self.header._replace(place=_place(place, phase), reads=0)
        return hash(self.header)

    def settle(self, reads: bool, updated: int) -> bool:
        """Meet at a read of what is not gathered, or at the end of a call. Returns whether any rank reads.

        `updated` parameters have newer rows; it must be the same number on all ranks.
        """
        kept = self.header
        self.header = kept._replace(place=LEAVING, reads=int(reads), params=updated)
        self._send()
        self.check()
        self.header = kept
        return bool(self.reads)

    def check(self, error: str | None = None) -> None:
        """Wait for the headers that are on their way, and compare them. `error`: why this rank refuses the call."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._compare(pending(), error)

    def explain(self, error: str | None = None) -> None:
        """Exchange headers, because hashes differ, and raise an error that names the difference."""
        self._send()
        self.check(error)
        raise SPMDError(
            "The ranks are in different places of a step.",
            remedy="Call the same steps in the same order on every rank.",
        )

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, when they meet, that this rank does not take part in the call."""
        if self.wire.world == 1 or self._has_met:
            return
        self._has_met = True
        self.header = self.header._replace(refused=True)
        try:
            self._contact(f"{type(error).__name__}: {error}")
        except SPMDError:
            # The caller raises its own.
            return

    def confirm(self, place: int, params: int, phase: str, together: bool) -> None:
        """Meet before a backward that is not planned, or, `together`, after one that differed from its plan."""
        self.header = self.header._replace(place=_place(place, phase), params=params)
        if together:
            self._send()
            self.check()
        else:
            self._contact()

    def _stamp(self) -> None:
        """Add the checksum to the header, once per call."""
        self._has_met = True
        checksum = self._checksum()
        if checksum is not None:
            self.header = self.header._replace(checksum=int(checksum))

    def _contact(self, error: str | None = None) -> None:
        """Meet the other ranks wherever they are: at the start of a call, or in its first bucket."""
        if self.plan is None:
            self._send()
            self.check(error)
            return
        first, *others = self.plan.buckets
        first.start_empty(self.wire, hash(self.header))
        first.wait()
        if first.hashes_agree(self.wire.world) and error is None:
            return
        # The other ranks look at the hash when all buckets have arrived.
        for bucket in others:
            bucket.start_empty(self.wire, 0)
        for bucket in others:
            bucket.wait()
        self.explain(error)

    def _compare(self, rows: list[list[int]], error: str | None) -> None:
        self.reads = functools.reduce(operator.or_, (CallHeader(*row).reads for row in rows))
        found = disagreement(rows)
        if found is None:
            return
        problem, remedy = found
        if any(CallHeader(*row).refused for row in rows):
            errors = self.wire.gather_objects(error)
            rank = next(rank for rank, text in enumerate(errors) if text is not None)
            problem, remedy = f"Rank {rank} refused the step: {errors[rank]}", "This rank has not updated anything."
        raise SPMDError(problem, remedy=remedy)

    def _send(self) -> None:
        with mark_work("header", 8 * len(self.header)):
            self._pending = self.wire.gather_numbers(torch.tensor(self.header, device=self.device))


def _place(place: int, phase: str) -> int:
    return place if phase == "inside" else place + _AFTER


# --------------------------------------------------------------------------------------------------------------------
# Sees when the step reads what is not gathered yet: gradients of earlier calls, and parameters after an update.
#
# Both are gathered only if something reads them. A mode that sees all functions of torch runs while there are any.

_DESCRIPTIONS = """
    grad requires_grad shape dtype device layout is_leaf grad_fn ndim names is_cuda is_sparse is_quantized is_meta size
    dim numel nelement nbytes itemsize stride is_floating_point is_complex is_contiguous is_conj is_neg element_size
    requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ has_names get_device
"""
# They do not look at values.
_HARMLESS = frozenset(_DESCRIPTIONS.split())
_PROPERTIES = frozenset(("__get__", "__set__", "__delete__"))


class ReadWatch(TorchFunctionMode):
    """Gathers before a read. `kept` are gradients of earlier calls; `stale` are parameters whose rows are newer."""

    def __init__(self, gather_kept: Callable[[], None], settle: Callable[[bool], None]) -> None:
        super().__init__()
        self.kept: dict[int, ManagedParam] = {}
        # By storage.
        self.stale: dict[int, tuple[ManagedParam, torch.Tensor]] = {}
        # Storages of parameters that were gathered after their update.
        self.updated: set[int] = set()
        # Reads, as in a roster.
        self.noticed = 0
        self._gather_kept, self._settle = gather_kept, settle
        self._is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notice reads and writes of the gradients that are kept, and of parameters."""
        kwargs = kwargs or {}
        if self.kept and getattr(func, "__self__", None) is torch.Tensor.grad and id(args[0]) in self.kept:
            managed = self.kept[id(args[0])]
            if func.__name__ != "__get__":
                self.drop([managed])
            elif not _only_drops():
                self._notice_gradient(managed)
            elif managed.kept is not None:
                # It only asks whether there is a gradient.
                return torch.empty(0)
        if self.stale and meets_all(func, (*args, *kwargs.values())):
            # Another rank may read before it.
            self.settle(False)
        if (self.stale or self.updated) and _reads(func):
            tensors = (tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided)
            self._notice({storage_key(tensor) for tensor in tensors})
        return func(*args, **kwargs)

    def _notice_gradient(self, managed: ManagedParam) -> None:
        self.noticed |= READS_KEPT
        # Gathered, or averaged with that of a backward.
        if managed.kept is None:
            self.drop([managed])
        else:
            with self.pausing():
                self._gather_kept()

    def _notice(self, storages: set[int]) -> None:
        if not storages.isdisjoint(self.updated):
            self.noticed, self.updated = self.noticed | READS_UPDATED, set()
        if not storages.isdisjoint(self.stale):
            self.noticed |= READS_UPDATED
            self.settle()

    def pausing(self) -> AbstractContextManager[Any]:
        """Let the engine's own reads pass."""
        return disable_torch_function()

    def settle(self, reads: bool = True) -> None:
        """Meet the other ranks, and gather if one of them reads."""
        if self.stale:
            with self.pausing():
                self._settle(reads)

    def drop(self, params: Iterable[ManagedParam]) -> None:
        """Forget the gradients that these parameters have kept."""
        for managed in params:
            managed.kept = None
            self.kept.pop(id(managed.plain), None)

    def start(self) -> None:
        """Watch, if there is a reason."""
        if not self._is_on and (self.kept or self.stale or self.updated):
            self._is_on = True
            put_function_mode(self, True)

    def stop(self) -> None:
        """Stop at the end of a call."""
        self.kept, self.stale, self.updated = {}, {}, set()
        self.rest()

    def rest(self) -> None:
        """Stop if there is no reason to watch, until there is one again."""
        if self._is_on and not (self.kept or self.stale or self.updated):
            self._is_on = False
            put_function_mode(self, False)


def _reads(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _PROPERTIES:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name not in _HARMLESS


def _only_drops() -> bool:
    """Is the caller torch's own `zero_grad`, which only sets gradients to None?"""
    frame = sys._getframe(2)
    code = frame.f_code
    is_torch = frame.f_globals.get("__name__", "").startswith("torch.")
    return is_torch and code.co_name == "zero_grad" and bool(frame.f_locals.get("set_to_none"))


def unmanaged_parameters(roots: Iterable[Any], known: Collection[int]) -> list[nn.Parameter]:
    """Parameters among the leaves of a graph that the engine does not manage. Other leaves are the rank's own.

    `known` are the identities of parameters that it does manage.
    """
    return [leaf for leaf in parameters_behind(roots) if id(leaf) not in known and managed_by(leaf) is None]


def parameters_behind(roots: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters among the leaves of a graph."""
    found = []
    seen = set()
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting += [following for following, _ in node.next_functions]
        elif isinstance(node.variable, nn.Parameter):
            found.append(node.variable)
    return found


class UseWatch(TorchFunctionMode):
    """Collects parameters that operations use, for a step in which no trainable one was found."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: dict[int, Any] = {}
        # By a backward.
        self.reached: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notice reads and writes of the gradients that are kept, and of parameters."""
        for value in (*args, *(kwargs or {}).values()):
            for element in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(element, nn.Parameter) and element.requires_grad and id(element) not in self._hooks:
                    self._watch(element)
        return func(*args, **(kwargs or {}))

    def _watch(self, param: nn.Parameter) -> None:
        if managed_by(param) is None:
            hook = param.register_post_accumulate_grad_hook(self.reached.append)  # type: ignore[no-untyped-call]
            self._hooks[id(param)] = hook

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()


# --------------------------------------------------------------------------------------------------------------------
# Averages gradients during every backward.
#
# Hooks on the parameters report what a backward touches. The first backward of a kind (the n-th one of a call of a
# step) ends with an exchange of what each rank has touched, and averages that. Later ones start a bucket as soon as
# it is full. The last bucket has a flag, by which a rank tells that it touched something else: then all exchange
# again.

# The call of a step.
INSIDE, AFTER = "inside", "after"


class Presence(enum.IntEnum):
    """A rank's part in a backward; ranks exchange it as a number."""

    PRESENT = 0
    ABSENT = 1
    # An error interrupted the backward, or the step before it.
    FAILED = 2


@dataclass
class _Backward:
    """A backward that is running."""

    plan: BackwardPlan | None
    progress: BucketProgress | None
    touched: dict[int, int] = field(default_factory=dict)
    # Touched once more after their bucket had started.
    again: set[int] = field(default_factory=set)
    unexpected: bool = False
    # The function that runs at its end. Autograd drops it if the backward raises an error.
    finisher: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_awaited(self) -> bool:
        """Will autograd call the function at its end?"""
        return self.finisher is not None and self.finisher() is not None

    def finish_by(self, function: Callable[[], None]) -> None:
        """Have autograd call this at the end of the backward, which runs now."""
        self.finisher = weakref.ref(function)
        at_end_of_backward(function)


class Averager:
    """Averages the gradients of the parameters of a roster at the end of each backward."""

    def __init__(self, wire: Wire, meeting: MeetingPoint, watch: ReadWatch) -> None:
        self.wire = wire
        self.meeting = meeting
        self.watch = watch
        self.roster: Roster | None = None
        self.phase = AFTER
        self.turn = 0
        self.backward: _Backward | None = None
        # Parameters with gradients that nothing averages.
        self.strangers: list[torch.Tensor] = []
        self.broken = False

    # -- the call

    def begin(self, roster: Roster) -> None:
        """Begin a call."""
        if roster is not self.roster:
            self._listen_to(roster)
        self.phase = INSIDE
        self.turn = 0
        self.backward = None
        self.broken = False

    def _listen_to(self, roster: Roster) -> None:
        if self.roster is not None:
            for managed in self.roster.params:
                managed.index = -1
        self.roster = roster
        for index, managed in enumerate(roster.params):
            managed.index = index
            managed.listener = self.touch

    def end(self, failed: bool) -> None:
        """End a call. If other ranks may be in a backward that this rank did not run, tell them."""
        assert self.roster is not None
        presence = Presence.FAILED if failed else Presence.ABSENT
        try:
            # An error has interrupted a backward that is still open.
            if self.backward is not None and not self.broken:
                self._close(self.backward, presence)
            while not self.broken and self.roster.plan_of(INSIDE, self.turn) is not None:
                self._close(self._open(), presence)
        finally:
            self.phase = AFTER
            self.turn = 0
            self.backward = None

    # -- the backward

    def touch(self, managed: ManagedParam) -> None:
        """Note that a gradient has been accumulated."""
        backward = self.backward
        if backward is None or not backward.is_awaited:
            if self.wire.world == 1 or not self.wire.is_open():
                return
            backward = self._enter(managed)
        index = managed.index if managed.index >= 0 else self._enlist(managed)
        if index in backward.touched:
            backward.again.add(index)
            return
        backward.touched[index] = 1 + len(backward.touched)
        if backward.progress is None or backward.plan is None:
            return
        if index not in backward.plan.expected:
            backward.unexpected = True
            return
        for number in backward.progress.arrive(index):
            if backward.plan.overlaps:
                with torch.no_grad(), self.watch.pausing():
                    self._start(backward.plan, number, False)

    def _enter(self, managed: ManagedParam) -> _Backward:
        """A backward has begun, or goes on after an error, with the gradient of this parameter."""
        assert self.roster is not None
        backward = self.backward = self.backward or self._open()
        # A function of its own: it lives as long as autograd has it.
        backward.finish_by(functools.partial(self._finish))
        moved = [param for param in self.roster.params if not param.hook_last()]
        if managed in moved:
            # Its other hooks are still to run.
            backward.again.add(managed.index)
        return backward

    def _start(self, plan: BackwardPlan, number: int, flag: bool) -> None:
        """Start a bucket. The first one tells a hash of what the ranks are doing."""
        hash_of_calls = self.meeting.hash(self.turn + 1, self.phase) if number == 0 else 0
        plan.start(self.wire, number, flag, hash_of_calls)

    def _enlist(self, managed: ManagedParam) -> int:
        """Add a parameter that another step manages."""
        assert self.roster is not None
        self.roster.params.append(managed)
        managed.index = len(self.roster.params) - 1
        managed.listener = self.touch
        return managed.index

    def _open(self) -> _Backward:
        assert self.roster is not None
        self.watch.settle()
        plan = self.roster.plan_of(self.phase, self.turn)
        if plan is None or self.roster.opens_with_header:
            self.meeting.arrive()
        progress = None if plan is None else plan.progress()
        return _Backward(plan, progress)

    @outside_dynamo
    def _finish(self) -> None:
        backward = self.backward
        if backward is None or self.roster is None:
            return
        self.strangers += unmanaged_parameters(roots_of_backward(), self.roster.plains)
        self._close(backward, Presence.PRESENT)

    @torch.no_grad()
    def _close(self, backward: _Backward, presence: Presence) -> None:
        """Average the gradients of a backward that is over. If that raises, the call is broken."""
        assert self.roster is not None
        self.backward = None
        self.broken = True
        self.meeting.check()
        with self.watch.pausing():
            if backward.plan is None:
                self._discover(backward, presence)
            else:
                self._average(backward, backward.plan, presence)
            self._refuse_shared(backward)
        if self.watch.kept:
            # The gradients are averages now.
            self.watch.drop([self.roster.params[index] for index in backward.touched])
        if self.roster.shards:
            self.roster.store.release()
        self.turn += 1
        self.broken = False

    def _refuse_shared(self, backward: _Backward) -> None:
        """Refuse two parameters with one gradient in memory: their sum, not each of them, was averaged twice."""
        assert self.roster is not None
        owners: dict[int, ManagedParam] = {}
        for index in backward.touched:
            managed = self.roster.params[index]
            grad = managed.plain.grad
            if grad is None or grad.layout is not torch.strided or not grad.numel():
                continue
            other = owners.setdefault(grad.data_ptr(), managed)
            if other is not managed:
                raise SPMDError(
                    f"The gradients of {other.name} and {managed.name} are one tensor, which a backward would average "
                    "twice.",
                    remedy="Set one of them to a clone, or to None, before backward().",
                )

    def _average(self, backward: _Backward, plan: BackwardPlan, presence: Presence) -> None:
        """Average by a plan. The last bucket has a flag if this rank has not touched what the plan expects."""
        assert backward.progress is not None
        is_as_expected = (
            presence is Presence.PRESENT
            and not backward.unexpected
            and not backward.again
            and len(backward.touched) == len(plan.expected)
        )
        first = backward.progress.next if plan.overlaps else 0
        last = len(plan.buckets) - 1
        for number in range(first, last + 1):
            self._start(plan, number, flag=number == last and not is_as_expected)
        plan.wait()
        if not plan.buckets[0].hashes_agree(self.wire.world):
            self.meeting.explain()
        if not plan.buckets[-1].flagged():
            plan.write_back()
            return
        self._discover(backward, presence, plan)

    def _discover(self, backward: _Backward, presence: Presence, plan: BackwardPlan | None = None) -> None:
        """Find out what any rank has touched, average it, and remember it. `plan` has been averaged already."""
        roster = self.roster
        assert roster is not None
        if plan is not None or self.turn or self.phase == AFTER:
            self.meeting.confirm(self.turn + 1, len(roster.params), self.phase, together=plan is not None)
        touched, again, presences = self._exchange(backward, presence)
        self._compare_presence(presences)
        order = agreed_order(touched)
        done: set[int] = set()
        if plan is not None:
            done = set(plan.expected).intersection(order) - again
            plan.write_back(lambda managed: managed.index in done)
        rest = roster.store.plan([index for index in order if index not in done])
        for number in range(len(rest.buckets)):
            rest.start(self.wire, number, False, 0)
        rest.wait()
        rest.write_back()
        if not order:
            roster.forget_after(self.phase, self.turn)
            return
        remembered = roster.store.plan(order)
        remembered.overlaps = not again and (plan is None or plan.overlaps)
        roster.remember(self.phase, self.turn, remembered)

    def _exchange(self, backward: _Backward, presence: Presence) -> tuple[list[list[int]], set[int], list[int]]:
        """Tell all what this rank has touched. Returns that of each rank, what any touched twice, and presences."""
        assert self.roster is not None
        count = len(self.roster.params)
        mine = [backward.touched.get(index, 0) for index in range(count)]
        twice = [int(index in backward.again) for index in range(count)]
        device = self.meeting.device
        rows = self.wire.gather_numbers(torch.tensor([*mine, *twice, presence.value], device=device))()
        touched = [row[:count] for row in rows]
        again = {index for row in rows for index in range(count) if row[count + index]}
        presences = [row[-1] for row in rows]
        return touched, again, presences

    def _compare_presence(self, presences: list[int]) -> None:
        some_failed = Presence.FAILED in presences
        if some_failed and presences[self.wire.rank] != Presence.FAILED:
            failed = presences.index(Presence.FAILED)
            raise SPMDError(
                f"The step raised an error on rank {failed}, but not on rank {self.wire.rank}.",
                remedy="See the error of that rank. Let all ranks raise, or none of them.",
            )
        if len(set(presences)) > 1 and not some_failed:
            present = [rank for rank, presence in enumerate(presences) if presence == Presence.PRESENT]
            raise SPMDError(
                f"Backward {self.turn + 1} of this call ran on the ranks {present}, but not on the others.",
                remedy="Call backward() equally often on every rank, with a loss of 0 if there is nothing to learn.",
            )
