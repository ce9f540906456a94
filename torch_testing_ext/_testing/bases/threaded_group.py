"""Process groups whose ranks are threads, under the names of torch.testing._internal.distributed.multi_threaded_pg."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    CallInGroup,
    GroupRecord,
    RankRecord,
    agreement_of,
    make_record,
)
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import grouped
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.groups import thread_worlds
from torch_testing_ext._torch.tensors.nested_tensors import tensors_in
from torch_testing_ext.launch import Cause

if TYPE_CHECKING:
    from torch_testing_ext._collectives.sanitizer.thread_waits import ThreadWaits
from torch_testing_ext._testing.bases.threaded_collectives import (
    CallOptions,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    finish_on_device,
    gather,
    name_of_op,
    options_of,
    reduce,
    reduce_scatter,
    scatter,
    split,
    written_and_read,
)

# The most calls that are kept of each rank.
_KEPT_CALLS = 1000


_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "threaded_ranks.py"))


class LeftAlone(RuntimeError):
    """Raised in a collective that cannot complete, because a member of the group has ended."""

    cause_of_failure = Cause.LOST_PEER


@dataclass
class WorldData:
    """The state of c10d about its groups, in one thread."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    # The world of torch has it since 2.15.
    pg_flight_recorder_hooks: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


@dataclass
class _Issued:
    """A collective of a rank that is a thread. `group`: its number among those of the rank.

    `options`: the root, and of a sanitized one the reduce operation and sizes. Only a record makes a `Call` of it: that
    takes longer than to note it.
    """

    kind: str
    order: int
    group: int | None
    shapes: list[torch.Size]
    types: list[torch.dtype]
    site: tuple[str, int, str] | None
    options: CallOptions
    is_over: bool = False
    raised: bool = False

    def in_group(self) -> CallInGroup:
        types = [str(dtype).removeprefix("torch.") for dtype in self.types]
        shapes = [str(list(shape)) for shape in self.shapes]
        agreement = agreement_of(self.kind, [shape.numel() for shape in self.shapes], types, ())
        call = Call(
            self.kind,
            order=self.order,
            shapes=tuple(shapes),
            inputs=tuple(f"{shape} {dtype}" for shape, dtype in zip(shapes, types, strict=True)),
            agreement=(*agreement, self.options.op),
            is_over=self.is_over,
            site=None if self.site is None else Site(*self.site),
            raised=self.raised,
            root=self.options.root,
            details=self.options.details(),
            exchange=self.options.exchange,
        )
        return CallInGroup(call, self.group, "threaded")


class ThreadLocalWorld(thread_worlds.world_class()):  # type: ignore[misc]
    """Replaces c10d's world: holds a WorldData for each thread, and the state that the threads share."""

    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()
        self._rendezvous: dict[Any, Rendezvous] = {}
        self.changed = threading.Condition()
        self.closed = False
        # The end of each rank, in words.
        self.ended: dict[int, str] = {}
        # The latest calls of each rank.
        self.issued: dict[int, deque[_Issued]] = {}
        # The groups that each rank has made.
        self.groups: dict[int, list[GroupRecord]] = {}
        # Ranks that wait in a collective, and whether their wait is over although they have not woken up yet.
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.record_ids = itertools.count(1)
        # What the sanitizer looks for, and what it has found in each rank.
        self.kinds: frozenset[SanitizeKind] = frozenset()
        self.notes: dict[int, list[dict[str, Any]]] = {}
        # The delays of each rank, if it has some.
        self.delays: dict[int, Any] = {}
        # The waits of each rank, if its work is followed.
        self.waits: dict[int, ThreadWaits] = {}

    def note(self, rank: int, kind: str, text: str, site: Any, issued: Any = None) -> None:
        """Note what the sanitizer has found in a rank."""
        notes = self.notes.setdefault(rank, [])
        notes.append({"kind": kind, "text": text, "site": site, "issued": issued})

    def _get_world(self) -> WorldData:
        if not hasattr(self._local, "world"):
            self._local.world = WorldData()
        world: WorldData = self._local.world
        return world

    def rendezvous(self, name: str, ranks: tuple[int, ...]) -> Rendezvous:
        with self.changed:
            return self._rendezvous.setdefault((name, ranks), Rendezvous(self, name, ranks))

    def leave(self, rank: int, how: str) -> None:
        with self.changed:
            self.ended.setdefault(rank, how)
            self.changed.notify_all()

    def close(self) -> None:
        """Wake all threads that wait in this world, and let none wait again."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def add_group(self, rank: int, group: GroupRecord) -> int:
        """Note that a rank has made a group; return the number of the group."""
        with self.changed:
            groups = self.groups.setdefault(rank, [])
            groups.append(group)
            return len(groups) - 1

    def record_of(self, rank: int) -> RankRecord:
        issued = list(self.issued.get(rank, ()))
        calls = [call.in_group() for call in issued]
        return make_record(rank, self.groups.get(rank, []), calls, len(issued) < _KEPT_CALLS)


def _own(name: str) -> property:
    """The attribute of that name of the thread's own data."""

    def get_own(world: ThreadLocalWorld) -> Any:
        return getattr(world._get_world(), name)

    def set_own(world: ThreadLocalWorld, value: Any) -> None:
        setattr(world._get_world(), name, value)

    return property(get_own, set_own)


for _name in WorldData.__dataclass_fields__:
    setattr(ThreadLocalWorld, _name, _own(_name))


# The world and the "threaded" backend that were there before ours.
_before: list[tuple[Any, Any]] = []


def _install_threaded_pg() -> ThreadLocalWorld:
    """Give each thread process groups of its own, initially none."""
    assert not _before, "a threaded world is installed already"
    world = ThreadLocalWorld()
    # PyTorch's own kit registers a backend under the same name; a process may have imported both.
    _before.append((thread_worlds.get_world(), thread_worlds.backend_plugin("threaded")))
    thread_worlds.set_backend_plugin("threaded", _PLUGIN)
    thread_worlds.set_world(world)
    thread_worlds.isolate_threads(True)
    return world


def _uninstall_threaded_pg() -> None:
    world, plugin = _before.pop()
    thread_worlds.set_world(world)
    thread_worlds.set_backend_plugin("threaded", plugin)
    thread_worlds.isolate_threads(False)


@dataclass
class _Collective:
    """One collective in progress."""

    arguments: dict[int, tuple[str, Any]] = field(default_factory=dict)
    is_complete: bool = False
    error: str = ""


class Rendezvous:
    """The meeting point of the threads of one group, for one collective after another."""

    def __init__(self, world: ThreadLocalWorld, name: str, ranks: tuple[int, ...]):
        self._world = world
        self._name = name
        self._ranks = ranks
        self._current = _Collective()
        self._counts = dict.fromkeys(range(len(ranks)), 0)
        self._numbers: dict[int, int] = {}

    def join(self, rank: int, number: int) -> None:
        """Note the number that the group has among those of a rank."""
        self._numbers[rank] = number

    def waits_of(self, rank: int) -> ThreadWaits | None:
        return self._world.waits.get(self._ranks[rank])

    def take_part(
        self, rank: int, kind: str, arguments: Any, work: Callable[[list[Any]], None], options: Mapping[str, Any]
    ) -> None:
        """Take part in a collective as `rank` of this group; return when it is complete."""
        finish_on_device(arguments)
        delays = self._world.delays.get(self._ranks[rank])
        if delays is not None:
            delays.wait()
        if self._world.kinds & {SanitizeKind.NAN, SanitizeKind.POISON}:
            outputs, inputs = written_and_read(rank, kind, arguments, options)
            self._check(rank, kind, outputs, inputs, options)
        with self._world.changed:
            collective, issued = self._enter(rank, kind, arguments, options)
            try:
                if rank == 0:
                    self._wait(rank, collective, lambda: len(collective.arguments) == len(self._ranks), kind)
                    self._current = _Collective()
                else:
                    self._wait(rank, collective, lambda: collective.is_complete, kind)
            except LeftAlone:
                issued.raised = True
                raise
        issued.is_over = True
        if rank == 0:
            try:
                self._complete(collective, work)
            except BaseException:
                issued.raised = True
                raise
        elif collective.error:
            issued.raised = True
            raise LeftAlone(f"left alone in {kind}: rank {self._ranks[0]} failed to execute it: {collective.error}")

    def _check(
        self, rank: int, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        """Note a NaN or infinity in the inputs; overwrite outputs that are no inputs, before other ranks write."""
        # Only where it is asked for.
        from torch_testing_ext._collectives.sanitizer import operation_checks

        if SanitizeKind.NAN in self._world.kinds:
            descriptions = (operation_checks.describe_non_finite(tensor, name_of_op(options)) for tensor in inputs)
            text = next(filter(None, descriptions), None)
            if text is not None:
                call = operation_checks.name_of_operation(kind, inputs)
                self._world.note(self._ranks[rank], "nan", f"{text} enter {call}", site_of_call())
        if SanitizeKind.POISON in self._world.kinds:
            operation_checks.Poison(self._ranks[rank]).overwrite(outputs, inputs)

    def _enter(self, rank: int, kind: str, arguments: Any, options: Mapping[str, Any]) -> tuple[_Collective, _Issued]:
        self._counts[rank] += 1
        tensors = list(tensors_in(arguments))
        issued = _Issued(
            kind,
            next(self._world.record_ids),
            self._numbers.get(rank),
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            site_of_call(),
            options_of(kind, arguments, options, bool(self._world.kinds)),
        )
        self._world.issued.setdefault(self._ranks[rank], deque(maxlen=_KEPT_CALLS)).append(issued)
        self._current.arguments[rank] = kind, arguments
        self._world.changed.notify_all()
        return self._current, issued

    def _wait(self, rank: int, collective: _Collective, done: Callable[[], bool], kind: str) -> None:
        """Wait until `done`. Raises LeftAlone if that cannot be, since a member has ended, or the test is over."""

        def gone() -> list[int]:
            missing = [rank for index, rank in enumerate(self._ranks) if index not in collective.arguments]
            return [rank for rank in missing if rank in self._world.ended]

        self._world.waiting[self._ranks[rank]] = done
        try:
            self._world.changed.wait_for(lambda: done() or gone() or self._world.closed)
        finally:
            del self._world.waiting[self._ranks[rank]]
        if not done():
            why = ", ".join(f"rank {rank} {self._world.ended[rank]}" for rank in gone())
            raise LeftAlone(f"left alone in {kind}: {why or 'the test is over'}")

    def _complete(self, collective: _Collective, work: Callable[[list[Any]], None]) -> None:
        try:
            self._check_agreement(collective)
            in_order = [arguments for _, (_, arguments) in sorted(collective.arguments.items())]
            with torch.no_grad():
                work(in_order)
            finish_on_device(in_order)
        except BaseException as error:
            collective.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._world.changed:
                collective.is_complete = True
                self._world.changed.notify_all()

    def _check_agreement(self, collective: _Collective) -> None:
        arrived = sorted(collective.arguments.items())
        by_kind = grouped((kind, str(self._ranks[index])) for index, (kind, _) in arrived)
        if len(by_kind) > 1:
            calls = "; ".join(f"{kind} by rank {', '.join(ranks)}" for kind, ranks in by_kind.items())
            raise RuntimeError(f"the ranks of group {self._name} call different collectives at once: {calls}")


def _issuer() -> Any:
    """The frame that has called a method of a group."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame


def site_of_call() -> tuple[str, int, str] | None:
    """The line of the program that calls a collective."""
    return next(torch_frames.program_places(sys._getframe(1)), None)


# Its stubs forbid overrides with fewer overloads, which c10d itself has.
_ProcessGroup: Any = dist.ProcessGroup


class ProcessLocalGroup(_ProcessGroup):  # type: ignore[misc, unused-ignore]
    """One rank of a group of threads. Every collective is complete when its call returns."""

    _rendezvous: Rendezvous
    _name: str

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size)
        self._rank = rank
        self._world_size = world_size
        # A rank's backward must find the rank's groups, so it must not run in autograd's own threads.
        self._autograd = torch.autograd.set_multithreading_enabled(False)

    @staticmethod
    def exception_handle(exc: BaseException) -> None:
        """Nothing to do: a rank's end, by an exception or not, wakes the ranks that wait for it."""

    @classmethod
    def reset(cls) -> None:
        """Nothing to do: each test has a world of its own."""

    def size(self) -> int:
        return self._world_size

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "threaded"

    def __repr__(self) -> str:
        return f"ThreadedPG world_size:{self._world_size} rank:{self._rank}"

    def _run(self, kind: str, arguments: Any, work: Callable[..., None], **options: Any) -> dist.Work:
        """Take part in a collective, and return a work that is done."""
        waits = self._rendezvous.waits_of(self._rank)
        with nullcontext() if waits is None else waits.check.issuing():
            self._rendezvous.take_part(self._rank, kind, arguments, partial(work, **options), options)
        done = thread_worlds.finished_work(arguments)
        if waits is not None:
            outputs, inputs = written_and_read(self._rank, kind, arguments, options)
            waits.issued(done, kind, outputs, inputs, _issuer())
        return done

    def _split(self, tensor: torch.Tensor, sizes: Any = None) -> list[torch.Tensor]:
        return split(tensor, sizes, self._world_size)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier", (), lambda arguments: None)

    def broadcast(self, tensor_list: Any, opts: Any) -> dist.Work:
        tensors = list(tensors_in(tensor_list))
        return self._run("broadcast", tensors, broadcast, root=opts.rootRank)

    def allreduce(self, tensor_list: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensor_list)
        return self._run("all_reduce", tensors, all_reduce, op=_op(opts))

    def allreduce_coalesced(self, tensor_list: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensor_list)
        return self._run("all_reduce_coalesced", tensors, all_reduce, op=_op(opts))

    def reduce(self, tensor_list: Any, opts: Any) -> dist.Work:
        tensors = list(tensor_list)
        return self._run("reduce", tensors, reduce, op=_op(opts), root=opts.rootRank)

    def allgather(self, output_tensors: Any, input_tensor: Any, opts: Any = None) -> dist.Work:
        outputs = list(_only(output_tensors))
        tensor = _only(input_tensor)
        return self._run("all_gather", (outputs, tensor), all_gather)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> dist.Work:
        outputs = list(_only(output_tensors)) if output_tensors else []
        tensor = _only(input_tensors)
        return self._run("gather", (outputs, tensor), gather, root=opts.rootRank)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> dist.Work:
        output = _only(output_tensors)
        tensors = list(_only(input_tensors)) if input_tensors else []
        return self._run("scatter", (output, tensors), scatter, root=opts.rootRank)

    def reduce_scatter(self, output_tensor: Any, scatter_list: Any, opts: Any = None) -> dist.Work:
        output = _only(output_tensor)
        tensors = list(_only(scatter_list))
        return self._run("reduce_scatter", (output, tensors), reduce_scatter, op=_op(opts))

    def alltoall(self, output_tensor_list: Any, input_tensor_list: Any, opts: Any = None) -> dist.Work:
        outputs = list(output_tensor_list)
        tensors = list(input_tensor_list)
        return self._run("all_to_all", (outputs, tensors), all_to_all)

    def all_gather_single(self, output_tensor: Any, input_tensor: Any, opts: Any = None) -> dist.Work:
        outputs = self._split(output_tensor)
        return self.allgather([outputs], [input_tensor], opts)

    def reduce_scatter_single(self, output_tensor: Any, input_tensor: Any, opts: Any = None) -> dist.Work:
        tensors = self._split(input_tensor)
        return self.reduce_scatter([output_tensor], [tensors], opts)

    def all_to_all_single(
        self, output_buffer: Any, input_buffer: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> dist.Work:
        outputs = self._split(output_buffer, output_split_sizes)
        tensors = self._split(input_buffer, input_split_sizes)
        return self.alltoall(outputs, tensors, opts)

    def all_gather_single_coalesced(self, output_tensor_list: Any, input_tensor_list: Any, opts: Any = None) -> Any:
        pairs = zip(output_tensor_list, input_tensor_list, strict=True)
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in pairs]
        return _last_of(works)

    def reduce_scatter_single_coalesced(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        pairs = zip(output_tensors, input_tensors, strict=True)
        works = [self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs]
        return _last_of(works)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _last_of(works: list[dist.Work]) -> dist.Work:
    """The work that stands for all."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _only(items: Any) -> Any:
    """Unpack a list of one item: c10d takes lists from the time when a process had several devices."""
    (item,) = items
    return item


def _create_threaded_pg(opts: Any, _: Any) -> ProcessLocalGroup:
    ranks = tuple(opts.global_ranks_in_group) or tuple(range(opts.group_size))
    group = ProcessLocalGroup(opts.group_rank, opts.group_size)
    group._name = opts.group_id
    world = thread_worlds.get_world()
    group._rendezvous = world.rendezvous(opts.group_id, ranks)
    description = "" if opts.global_ranks_in_group else "default_pg"
    record = GroupRecord(opts.group_id, description, ranks, opts.group_rank)
    number = world.add_group(ranks[opts.group_rank], record)
    group._rendezvous.join(opts.group_rank, number)
    return group


dist.Backend.register_backend("threaded", _create_threaded_pg, extended_api=True, devices=["cpu", "cuda", "xpu"])


_PLUGIN = thread_worlds.backend_plugin("threaded")
