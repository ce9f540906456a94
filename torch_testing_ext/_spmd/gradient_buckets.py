"""Gradients travel in buckets: which go together, the parameters that they are of, the collectives, their picture."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from torch_testing_ext._torch.tracing import (
    MemoryReference,
    copy_all,
    gather_into,
    outside_dynamo,
    run_hook_last,
)

from .parallel_modes import Layout

# --------------------------------------------------------------------------------------------------------------------
# Decides which gradients travel together, in which order, and when a bucket may start.
#
# Pure: parameters are numbers, and everything here is computed alike on every rank.

_MIB = 2**20


def bucket_limit(total: int, accelerator: bool) -> int:
    """The largest size of a bucket in bytes, for gradients of `total` bytes: a quarter of them, within bounds."""
    largest = 25 * _MIB if accelerator else 8 * _MIB
    return min(max(total // 4, _MIB), largest)


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Put positions 0, 1, ... into buckets of one kind and of at most `limit` bytes, unless a single one has more.

    The buckets are in the order in which they are complete if gradients come one after the other.
    """
    # By kind: the bucket that may still grow, and its size.
    growing: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind not in growing or filled[kind] + size > limit:
            growing[kind] = []
            filled[kind] = 0
            buckets.append(growing[kind])
        growing[kind].append(position)
        filled[kind] += size
    return sorted(buckets, key=lambda bucket: bucket[-1])


def agreed_order(positions: Sequence[Sequence[int]]) -> list[int]:
    """The parameters that any rank's backward has reached, in the order of the first rank that reached each.

    `positions` has one row per rank: for each parameter 1 + its place in the rank's backward, or 0.
    """
    keys: dict[int, tuple[int, int]] = {}
    for rank, places in enumerate(positions):
        for param, place in enumerate(places):
            if place:
                keys.setdefault(param, (rank, place))
    # Places on different ranks are comparable: they are the distance from the loss.
    return sorted(keys, key=lambda param: (keys[param][1], keys[param][0], param))


@dataclass
class BucketProgress:
    """Counts the gradients that have arrived in a backward. Buckets start in their order, the last one at the end."""

    bucket_of: dict[int, int]
    missing: list[int]
    next: int = 0

    @classmethod
    def of(cls, buckets: Sequence[Sequence[int]]) -> BucketProgress:
        numbers = {param: number for number, bucket in enumerate(buckets) for param in bucket}
        return cls(numbers, [len(bucket) for bucket in buckets])

    def arrive(self, param: int) -> range:
        """Note a gradient, and return the buckets that start now."""
        self.missing[self.bucket_of[param]] -= 1
        first = self.next
        while self.next < len(self.missing) - 1 and not self.missing[self.next]:
            self.next += 1
        return range(first, self.next)


# --------------------------------------------------------------------------------------------------------------------
# Parameters that the engine manages, and the hook by which each tells that a backward has reached it.


class ManagedParam:
    """One parameter of a data-parallel step.

    `plain` is the whole tensor that the step sees. `rest` is the DTensor that model and optimizers hold between calls,
    or None if they keep `plain`.
    """

    def __init__(self, plain: torch.Tensor, layout: Layout, name: str, rest: Any = None) -> None:
        self._plain = weakref.ref(plain)
        self._strong = plain if rest is not None else None
        self._rest: Callable[[], Any] | None = weakref.ref(rest) if rest is not None else None
        self.layout, self.name = layout, name
        self.kind = plain.shape, plain.dtype
        # In no roster.
        self.index = -1
        # Hears of gradients.
        self.listener: Callable[[ManagedParam], None] | None = None
        # The rank's rows of a gradient from an earlier call.
        self.kept: torch.Tensor | None = None
        # The memory of the parameter and of its gradient in the last call, which something may have kept.
        self.memory: MemoryReference | None = None
        self.memory_of_gradient: MemoryReference | None = None
        # The handle of the hook.
        self.hooked: Any = None
        # No call has it as `plain`.
        self.at_rest = False

    @property
    def plain(self) -> Any:
        return self._strong if self._strong is not None else self._plain()

    @property
    def rest(self) -> Any:
        """The tensor that the model holds between calls."""
        return self._rest() if self._rest is not None else self.plain

    @property
    def rests_as_dtensor(self) -> bool:
        return self._rest is not None

    @property
    def sharded(self) -> bool:
        return self.layout.sharded

    def set_rest(self, rest: Any) -> None:
        """Hold another DTensor between calls, for example one of another dtype."""
        rest.__dict__.pop(RECORD, None)
        self._rest = weakref.ref(rest)
        _know(rest, lambda: self)

    def allow_swap(self) -> None:
        """Refer to the DTensor without a weak reference, until the next call: torch swaps no tensor that has one."""
        rest = self.rest
        if self._rest is not None and RECORD not in rest.__dict__:
            _known.pop(id(rest), None)
            rest.__dict__[RECORD] = self
            self._rest = lambda: rest

    def rows(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A view of the rows of a whole tensor that belong to a rank, by default this one."""
        start, end = self.layout.rows_of(self.layout.rank if rank is None else rank)
        return whole[start:end]

    def hook(self) -> None:
        """Report every gradient that a backward accumulates, for ever."""
        itself, plain = weakref.ref(self), self.plain
        trainable = plain.requires_grad

        @outside_dynamo
        def report(_: torch.Tensor) -> None:
            managed = itself()
            if managed is not None and managed.listener is not None:
                managed.listener(managed)

        # A frozen parameter cannot get a hook, and the step may make it trainable.
        plain.requires_grad_(True)
        self.hooked = plain.register_post_accumulate_grad_hook(report)
        plain.requires_grad_(trainable)

    def hook_last(self) -> bool:
        """Let other hooks, which may change the gradient, run before ours. Returns whether they did already."""
        plain = self.plain
        return plain is None or self.hooked is None or run_hook_last(plain, self.hooked)


# The attribute of a DTensor that torch may swap with another one, such as that of a conversion: its record.
RECORD = "_spmd_record"
# By identity. A record that keeps `plain` alive must not be kept alive by it: it lives as long as its `rest`.
_known: dict[int, tuple[weakref.ref[Any], Callable[[], ManagedParam | None]]] = {}


def _know(tensor: torch.Tensor, find: Callable[[], ManagedParam | None]) -> None:
    number = id(tensor)

    def forget(reference: weakref.ref[Any]) -> None:
        if number in _known and _known[number][0] is reference:
            del _known[number]

    _known[number] = weakref.ref(tensor, forget), find


def managed_by(tensor: torch.Tensor) -> ManagedParam | None:
    """The record of a parameter, in either of its forms."""
    reference, find = _known.get(id(tensor), (None, None))
    if find is not None and reference is not None and reference() is tensor:
        return find()
    record: ManagedParam | None = tensor.__dict__.get(RECORD)
    return record if record is not None and record.rest is tensor else None


def forget_parameter(managed: ManagedParam) -> None:
    """Let a parameter be as if no step had had it."""
    managed.listener = None
    for tensor in (managed.plain, managed.rest):
        _known.pop(id(tensor), None)


def manage_parameter(plain: torch.Tensor, layout: Layout, name: str, rest: Any = None) -> ManagedParam:
    managed = ManagedParam(plain, layout, name, rest)
    _know(plain, weakref.ref(managed) if rest is not None else lambda: managed)
    if rest is not None:
        _know(rest, lambda: managed)
    return managed


# --------------------------------------------------------------------------------------------------------------------
# The collectives of the engine, on flat tensors.

_CHUNK_BYTES = 64 * 2**20


class Wire:
    """The ranks that train together, and how this rank reaches them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world = group.size()
        self.rank = dist.get_rank(group)

    def is_open(self) -> bool:
        """Does the group still exist?"""
        return dist.is_initialized() and dist.group.WORLD is self.group

    def add(self, flat: torch.Tensor) -> Any:
        """Start to sum a flat tensor over ranks, in place. Returns the work to wait for."""
        return dist.all_reduce(as_real(flat), group=self.group, async_op=True)

    def start_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Any:
        """Start to fill `into` with the tensors of all ranks, one after the other."""
        return gather_into(as_real(into), as_real(mine), self.group)

    def gather_numbers(self, numbers: torch.Tensor) -> Callable[[], list[list[int]]]:
        """Start to gather a row of integers from each rank. Returns a function that waits for all rows."""
        into = numbers.new_empty((self.world, *numbers.shape))
        work = self.start_gather(into.view(-1), numbers)

        def rows() -> list[list[int]]:
            work.wait()
            numbers_of_ranks: list[list[int]] = into.tolist()
            return numbers_of_ranks

        return rows

    def gather_objects(self, mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def broadcast(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Overwrite `tensors`, of any dtypes, with those of rank 0, by way of `device`."""
        dense = [tensor.detach() for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        # The widest dtype first: this aligns every tensor, so that the bytes can be viewed as its dtype.
        dense.sort(key=lambda tensor: -tensor.element_size())
        sizes = [tensor.nbytes for tensor in dense]
        for numbers in plan_buckets(sizes, [None] * len(sizes), _CHUNK_BYTES):
            self._broadcast_chunk([dense[i] for i in numbers], device)

    def _broadcast_chunk(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Send one flat tensor of bytes."""
        pieces = []
        for tensor in tensors:
            in_bytes = tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)
            pieces.append(in_bytes.to(device))
        flat = torch.cat(pieces)
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        if self.rank == 0:
            return
        sizes = [tensor.nbytes for tensor in tensors]
        for tensor, piece in zip(tensors, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """A view of a complex tensor as real numbers; another tensor itself."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


# --------------------------------------------------------------------------------------------------------------------
# Traces of torch's profiler, drawn for Perfetto: each rank is a process with rows of computation and communication.

# Begins the name of an event that has a number of bytes and a title.
MARK = "spmd|"
_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast")

_NOTHING = nullcontext()
_is_drawing = False

Event = dict[str, Any]


def mark_work(title: str, nbytes: int) -> AbstractContextManager[Any]:
    """Name a part of the work and its data, for a picture that may be recorded."""
    return record_function(f"{MARK}{nbytes}|{title}") if _is_drawing else _NOTHING


@contextmanager
def record_picture(rank: int, gather: Callable[[Any], list[Any]], path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the work in this context, which all ranks enter, and let rank 0 write their picture to `path`.

    `gather` returns the objects of all ranks.
    """
    global _is_drawing
    with profile(activities=supported_activities()) as profiler:  # type: ignore[no-untyped-call]
        _is_drawing = True
        try:
            yield
        finally:
            _is_drawing = False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        of_ranks = gather(events_of(rank, json.loads(file.read_text(encoding="utf-8"))))
    if rank == 0:
        events = list(itertools.chain.from_iterable(of_ranks))
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def events_of(rank: int, trace: Mapping[str, Any]) -> list[Event]:
    """One rank's events as those of a process, whose threads are rows of computation or communication."""
    spans = [_read(event) for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans.sort(key=lambda event: event["ts"])
    transfers = [event for event in spans if _is_transfer(event)]
    kinds = _ON_DEVICE if any(event["cat"] == "kernel" for event in spans) else _ON_HOST
    busy = {event["tid"] for event in transfers}
    drawn = []
    for event in spans:
        if event["cat"] in kinds and event["tid"] not in busy:
            drawn.append(("computation", event))
    for event in _named(transfers, spans):
        drawn.append(("communication", event))
    titles = {event["tid"]: title for title, event in drawn}
    rows = {tid: row for row, tid in enumerate(titles)}
    result: list[Event] = [_name_event(rank, "process_name", f"rank {rank}")]
    for tid, title in titles.items():
        result.append({**_name_event(rank, "thread_name", title), "tid": rows[tid]})
    zero = trace.get("baseTimeNanoseconds", 0) / 1000
    for title, event in drawn:
        place = {"ph": "X", "pid": rank, "tid": rows[event["tid"]], "cat": title}
        result.append({**place, **_times(event, zero)})
    return result


def _name_event(rank: int, kind: str, name: str) -> Event:
    """An event that names a process or one of its rows."""
    return {"ph": "M", "pid": rank, "name": kind, "args": {"name": name}}


def _is_transfer(event: Event) -> bool:
    """Is this a collective of gloo, or a kernel of NCCL?"""
    name: str = event["name"]
    of_nccl: bool = event["cat"] == "kernel" and "nccl" in name
    return of_nccl or name.startswith("gloo:")


def _read(event: Event) -> Event:
    """Turn the name of a mark into a title and arguments."""
    if not event["name"].startswith(MARK):
        return event
    _, nbytes, title = event["name"].split("|", 2)
    return {**event, "name": title, "args": {"bytes": int(nbytes)}}


def _times(event: Event, zero: float) -> Event:
    return {
        "name": event["name"],
        "ts": event["ts"] + zero,
        "dur": event["dur"],
        "args": event.get("args", {}),
    }


def _named(transfers: Sequence[Event], spans: Sequence[Event]) -> Iterator[Event]:
    """Name transfers by the marks in which they were started. Those of one kind begin in the order of their starts."""
    marks = [event for event in spans if "bytes" in event.get("args", ()) and event["cat"] == "user_annotation"]
    for kind in _COLLECTIVES:
        calls = [event for event in spans if event["name"].startswith("c10d::")]
        starts = [event["ts"] for event in calls if kind in _plain_name(event)]
        same = [event for event in transfers if kind in _plain_name(event).lower()]
        for start, event in zip(starts, same, strict=False):
            around = [mark for mark in marks if mark["ts"] <= start < mark["ts"] + mark["dur"]]
            if around:
                mark = around[-1]
                event = {**event, "name": mark["name"].removeprefix("start "), "args": mark["args"]}
            yield event


def _plain_name(event: Event) -> str:
    name: str = event["name"]
    return name.replace("_", "")


# --------------------------------------------------------------------------------------------------------------------
# Buckets of gradients, which travel as one flat tensor.

# Of a hash, each of which is one element: sums over ranks tell whether all have the same.
_BITS = 24
_MASK = 2**_BITS - 1


class GradientBucket:
    """Gradients of one dtype and device in one flat tensor. At its end are a flag and the bits of a hash."""

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        self.params = tuple(params)
        self.nbytes = sum(managed.plain.nbytes for managed in params)
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        # The flag and the bits; their sums over ranks after the last wait.
        self._tail = torch.empty(0)
        self._sums = [0.0]
        self._work: Any = None

    def start(self, wire: Wire, flag: bool, number: int = 0) -> None:
        """Start to average the gradients as they are now."""
        self._fill(1 / wire.world)
        self._start(wire, flag, number)

    def start_empty(self, wire: Wire, number: int) -> None:
        """Take part in a collective of this shape, without gradients."""
        self._allocate()
        self._start(wire, False, number)

    def _start(self, wire: Wire, flag: bool, number: int) -> None:
        assert self._flat is not None
        if flag or number:
            self._tail.copy_(torch.tensor([float(flag), *lowest_bits(number)]))
        else:
            self._tail.zero_()
        self._work = wire.add(self._flat)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            tail = self._tail.real if self._tail.is_complex() else self._tail
            self._sums = tail.tolist()

    def flagged(self) -> bool:
        """Has any rank set the flag?"""
        return self._sums[0] != 0

    def hashes_agree(self, world: int) -> bool:
        """Have all ranks sent the same number?"""
        return {0.0, float(world)}.issuperset(self._sums[1:])

    def write_back(self, wanted: Callable[[ManagedParam], bool] | None = None) -> None:
        """Overwrite gradients with their means."""
        grads = []
        means = []
        for managed, mean in zip(self.params, self._views, strict=True):
            if wanted is not None and not wanted(managed):
                continue
            grad = _dense_gradient(managed, mean)
            if grad is not None:
                grads.append(grad)
                means.append(mean)
        copy_all(grads, means)

    def release(self) -> None:
        self._flat = None
        self._views = []
        self._tail = torch.empty(0)

    def _allocate(self) -> None:
        if self._flat is not None:
            return
        like = self.params[0].plain
        sizes = [managed.plain.numel() for managed in self.params]
        in_tail = 1 + _BITS
        self._flat = torch.empty(sum(sizes) + in_tail, dtype=like.dtype, device=like.device)
        *pieces, self._tail = self._flat.split([*sizes, in_tail])  # type: ignore[no-untyped-call]
        shapes = [managed.plain.shape for managed in self.params]
        self._views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _fill(self, scale: float) -> None:
        self._allocate()
        for managed, view in zip(self.params, self._views, strict=True):
            grad = managed.plain.grad
            if grad is None:
                view.zero_()
            else:
                dense = grad if grad.layout is torch.strided else grad.to_dense()
                torch.mul(dense, scale, out=view)
            if managed.kept is not None:
                # The rank's rows of a mean that the other ranks do not have.
                managed.rows(view).add_(managed.kept)


def lowest_bits(number: int) -> list[float]:
    """The lowest bits of a number, each as 0 or 1. Hashes of two calls differ, so that a collision lasts one call."""
    return [*map(float, f"{number & _MASK:0{_BITS}b}")]


def _dense_gradient(managed: ManagedParam, mean: torch.Tensor) -> torch.Tensor | None:
    """The gradient into which a mean is to be copied, unless it has been set here."""
    managed.kept = None
    plain = managed.plain
    grad = plain.grad
    # Torch's optimizers refuse a lazy conjugate.
    if grad is None or grad.is_conj() or grad.is_neg():
        plain.grad = torch.empty_like(plain).copy_(mean)
    elif grad.layout is torch.strided:
        return grad  # type: ignore[no-any-return]
    else:
        plain.grad = mean.to_sparse(grad.sparse_dim())
    return None


class BackwardPlan:
    """The gradients that one backward of a call averages, in buckets, in the order in which they are expected."""

    def __init__(
        self, order: Sequence[int], buckets: Sequence[GradientBucket], numbers: Sequence[Sequence[int]]
    ) -> None:
        self.expected = frozenset(order)
        self.buckets = buckets
        self._numbers = numbers
        # With the backward.
        self.overlaps = True

    def progress(self) -> BucketProgress:
        return BucketProgress.of(self._numbers)

    def start(self, wire: Wire, number: int, flag: bool, told: int) -> None:
        """Start one bucket, which also carries a flag and a number."""
        with mark_work(f"start bucket {number}", self.buckets[number].nbytes):
            self.buckets[number].start(wire, flag, told)

    def wait(self) -> None:
        for number, bucket in enumerate(self.buckets):
            with mark_work(f"wait for bucket {number}", bucket.nbytes):
                bucket.wait()

    def write_back(self, wanted: Callable[[ManagedParam], bool] | None = None) -> None:
        """Overwrite gradients, by default all, with their means."""
        for number, bucket in enumerate(self.buckets):
            with mark_work(f"write back bucket {number}", bucket.nbytes):
                bucket.write_back(wanted)


class BucketStore:
    """Makes buckets of the parameters of a roster. Plans with the same bucket share its memory."""

    def __init__(self, params: Sequence[ManagedParam], limit: int | None) -> None:
        self.params = params
        self._limit = limit
        self._buckets: dict[tuple[int, ...], GradientBucket] = {}

    def plan(self, order: Sequence[int]) -> BackwardPlan:
        """Plan buckets for the parameters of these numbers."""
        plains = [self.params[number].plain for number in order]
        sizes = [plain.nbytes for plain in plains]
        kinds = [(plain.dtype, plain.device) for plain in plains]
        has_accelerator = bool(plains) and plains[0].device.type != "cpu"
        limit = self._limit or bucket_limit(sum(sizes), has_accelerator)
        numbers = []
        for positions in plan_buckets(sizes, kinds, limit):
            numbers.append(tuple([order[position] for position in positions]))
        return BackwardPlan(order, [self._bucket(of_bucket) for of_bucket in numbers], numbers)

    def _bucket(self, numbers: tuple[int, ...]) -> GradientBucket:
        if numbers not in self._buckets:
            self._buckets[numbers] = GradientBucket([self.params[number] for number in numbers])
        return self._buckets[numbers]

    def release(self) -> None:
        for bucket in self._buckets.values():
            bucket.release()
