"""Work that Python callers got: whether they wait for it, and what they do to its buffers before that.

Work that C++ keeps, such as that of DDP's reducer and of functional collectives, is not followed: its waits are in C++.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torch_testing_ext._torch import torch_frames, training
from torch_testing_ext._torch.operations import operation_hook, tensor_uses, works
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.tensors import tensor_reads

from .flying_buffers import Buffer, Span, do_overlap, overlap_each_other, pieces_of, storage_of
from .operation_checks import Check, Note, inputs_of, name_of_operation, operation_in_words, outputs_of
from .result_samples import Begun, ResultSampler

# References to a work that only this module has: that of the table, and that of the argument of sys.getrefcount.
_OURS = 2
# In these, gloo writes to the memory of its tensors only. Elsewhere it copies tensors, which counts as a write.
_SILENT = ("all_reduce", "broadcast", "reduce")
_PLAIN = ("sum", "product", "min", "max", "band", "bor", "bxor")


def _no_queue() -> None:
    """Nothing orders the operations."""


@dataclass(slots=True)
class _OpenWork:
    """Work that nobody has waited for yet."""

    work: Any
    name: str
    site: int
    buffers: list[Buffer]
    # The memory of its outputs and, without these, of its inputs.
    locate: Callable[[], tuple[list[Span], list[Span]]]
    # Operations of one queue, as those of a group on a device, come one after the other.
    queue: Callable[[], Any] = _no_queue
    # The future that somebody has asked the work for.
    future: Any = None
    # A finding about its buffers has been made.
    is_told: bool = False
    # Its number in the log, and samples of its inputs, if its result can be compared with these.
    number: int = -1
    begun: Begun | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether nobody has the work any more, nor its future. `self` has one, and so has the argument."""
        if sys.getrefcount(self.work) > _OURS:
            return False
        return self.future is None or sys.getrefcount(self.future) <= _OURS

    def use_by(self, read: Sequence[Span], written: Sequence[Span]) -> str:
        """Describe how another use of memory interferes: "" if it does not, or only reads an input."""
        outputs, inputs = self.locate()
        if do_overlap(written, outputs) or do_overlap(written, inputs):
            return "written"
        return "read" if do_overlap(read, outputs) else ""


class WaitCheck(Check):
    """Finds work that nobody waited for, and buffers that are written, resized or freed before the wait."""

    wants_results = True

    def __init__(self, note: Note, site: Callable[[], int], sampler: ResultSampler | None = None):
        """`site`: the number of the line that runs now, to find the uses of buffers when they happen."""
        self._note = note
        self._site = site
        self._sampler = sampler
        # The call that each thread issues.
        self._issued: dict[int, _Issued] = {}
        # Work that a thread waits for; None if several do, which may go on one before the other.
        self._awaited: dict[int, _OpenWork | None] = {}
        self._uses: Any = None
        self._watches_threads = False
        self._is_issuing = self._listens = False
        self._open: dict[int, _OpenWork] = {}
        self._lock = threading.RLock()

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        if operation_hook.is_synchronous(spec, args):
            if self._issued:
                # The call before it has raised.
                self._issued.pop(threading.get_ident(), None)
        else:
            issued = self._issued[threading.get_ident()] = _Issued(spec, args)
            if self._sampler is not None:
                issued.begun = self._sampler.begin(
                    spec, args, group, issued.name, issued.op, issued.inputs, issued.outputs
                )
        # A single tensor is the most frequent argument by far.
        listed: Any = () if spec.outputs is None else args[spec.outputs]
        is_single = isinstance(listed, torch.Tensor) or (len(listed) == 1 and isinstance(listed[0], torch.Tensor))
        if not is_single and overlap_each_other(outputs_of(spec, args)):
            self._note("race", f"outputs of {operation_in_words(spec, args)} overlap each other", site, 0)
        if self._open:
            with self._lock:
                issued = self._issued.get(threading.get_ident()) or _Issued(spec, args)
                written, read = issued.spans()
                self._find_use(issued.name, read, written, site, issued.queue())

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> None:
        issued = self._issued.pop(threading.get_ident(), None) if self._issued else None
        if issued is None and not self._open:
            return
        with self._lock:
            self._find_dropped()
            if (
                issued is None
                or issued.args is not args
                or not _is_for_caller(torch_frames.issuer_of(sys._getframe(2)))
            ):
                return
            work = works.work_of(result)
            if work is not None:
                opened = _OpenWork(work, issued.name, site, issued.buffers(), issued.spans, issued.queue, number=number)
                opened.begun = issued.begun
                self._add(opened)

    def _add(self, entry: _OpenWork) -> None:
        if not self._listens:
            # To put the methods of tensors back after each work would take longer than all else.
            self._listens = True
            tensor_reads.listen_to_reads(self)
        self._open[id(entry.work)] = entry

    def _remove(self, entry: _OpenWork) -> None:
        del self._open[id(entry.work)]

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """A rank that is a thread takes part in an operation: what that does to tensors is no use of a buffer."""
        with self._lock:
            buffers = [buffer for entry in self._open.values() for buffer in entry.buffers]
        watched = [buffer for buffer in buffers if buffer.version is not None]
        untouched = [buffer for buffer in watched if buffer.version == training.version_of(buffer.tensor)]
        self._is_issuing = True
        try:
            yield
        finally:
            self._is_issuing = False
            for buffer in untouched:
                buffer.version = training.version_of(buffer.tensor)

    def after_in_thread(
        self,
        work: Any,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        site: int,
        issuer: Any,
    ) -> None:
        """An operation of a rank that is a thread is complete; the rank gets this work."""
        with self._lock:
            self._find_dropped()
            if _is_for_caller(issuer):
                own_inputs = _without_storages_of(outputs, inputs)
                buffers = [*_buffers_at_rest(outputs), *_buffers_at_rest(own_inputs)]
                spans = pieces_of(outputs), pieces_of(own_inputs)
                self._add(_OpenWork(work, name, site, buffers, lambda: spans))

    def waited(self, work: Any) -> None:
        """Somebody waits for a work, or has been told that it is complete."""
        with self._lock:
            entry = self._open.get(id(work))
            if entry is not None:
                self._remove(entry)
                if entry.begun is not None:
                    self._awaited[id(work)] = entry
            elif id(work) in self._awaited:
                self._awaited[id(work)] = None
        if entry is not None:
            self._check_buffers(entry)

    def wait_is_over(self, work: Any, is_complete: bool) -> None:
        """A wait for a work has ended, and its caller is about to go on. The work may not be complete."""
        with self._lock:
            entry = self._awaited.pop(id(work), None)
            if entry is None or entry.begun is None or self._sampler is None:
                return
            if is_complete and not entry.is_told:
                self._sampler.end(entry.begun, entry.number)

    def future_taken(self, work: Any, future: Any) -> None:
        with self._lock:
            entry = self._open.get(id(work))
            if entry is not None:
                entry.future = future
                # Whoever has the future may go on before we hear of it.
                entry.begun = None

    def _with_future(self, future: Any) -> list[_OpenWork]:
        return [entry for entry in list(self._open.values()) if entry.future is future]

    def future_used(self, future: Any) -> None:
        for entry in self._with_future(future):
            self.waited(entry.work)

    def future_chained(self, future: Any, result: Any) -> None:
        """A future has a callback that tells nobody that it is complete: only the result does."""
        for entry in self._with_future(future):
            entry.future = result

    def watch_uses(self, other_threads: bool = False) -> None:
        """From now on, look at each operation of this thread, and of those that it starts."""
        self._uses = tensor_uses.TensorUses(self._on_use)
        self._uses.__enter__()
        if other_threads and threading.getprofile() is None:
            self._watches_threads = True
            threading.setprofile(self._watch_thread)

    def _watch_thread(self, *_: object) -> None:
        """Called by Python in a new thread."""
        sys.setprofile(None)
        if self._uses is not None:
            tensor_uses.TensorUses(self._on_use).__enter__()  # type: ignore[no-untyped-call]

    # -- the listener of reads

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        if self._open and not self._is_issuing:
            with self._lock:
                self._find_use(f"{method}()", pieces_of([tensor]), [])

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        if not self._open:
            return
        with self._lock:
            for entry in self._open.values():
                if entry.use_by([], pieces_of([tensor])):
                    entry.buffers.append(Buffer.alias(alias, self._site()))

    def _on_use(self, operation: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        if self._open and not self._is_issuing:
            with self._lock:
                self._find_use(operation, pieces_of(read), pieces_of(written))

    def _find_use(
        self, by: str, read: Sequence[Span], written: Sequence[Span], site: int | None = None, queue: Any = None
    ) -> None:
        """Note the first use of each buffer before its work is waited for. `site`: of the use; None: of this moment."""
        for entry in self._open.values():
            is_ordered = queue is not None and queue == entry.queue()
            if entry.is_told or is_ordered:
                continue
            how = entry.use_by(read, written)
            if how and not torch_frames.is_opening_pipeline(sys._getframe(1)):
                entry.is_told = True
                site_of_use = self._site() if site is None else site
                text = f"a buffer of {entry.name} was {how} by {by} before wait()"
                self._note("race", text, site_of_use, entry.site)

    def _check_buffers(self, entry: _OpenWork) -> None:
        """Note what has happened to a buffer of a work until somebody waited for it, at its line if that is known."""
        if entry.is_told:
            return
        happened = [(buffer.site, buffer.what_happened()) for buffer in entry.buffers]
        changes = [(site, how) for site, how in happened if how]
        if changes:
            entry.is_told = True
            site, how = max(changes, key=lambda change: change[0])
            text = f"a buffer of {entry.name} was {how} before wait()"
            self._note("race", text, site or self._site(), entry.site)

    def _find_dropped(self) -> None:
        """The caller of the latest operation has its work by now; one that nobody has any more is not waited for."""
        for number in list(self._open):
            entry = self._open[number]
            if entry.is_dropped:
                self._remove(entry)
                self._unwaited(entry)

    def finish(self) -> None:
        if self._uses is not None:
            self._uses.__exit__(None, None, None)
            self._uses = None
        if self._watches_threads:
            threading.setprofile(None)
        with self._lock:
            for entry in list(self._open.values()):
                self._remove(entry)
                self._unwaited(entry)
        if self._listens:
            self._listens = False
            tensor_reads.stop_listening_to_reads(self)
        if self._sampler is not None:
            self._sampler.finish()

    def _unwaited(self, entry: _OpenWork) -> None:
        what = "work" if entry.future is None else "future"
        self._note("unwaited", f"nobody waited for the {what} of {entry.name}", entry.site, 0)


def _is_for_caller(issuer: Any) -> bool:
    """Whether the function that issues an operation gives its work to a caller in Python, which must wait for it."""
    return torch_frames.is_called_by_distributed(issuer) and not torch_frames.is_for_join(issuer)


class _Issued:
    """A call that is being issued, or runs: its tensors, and what can be said about them."""

    begun: Begun | None = None
    _spans: tuple[list[Span], list[Span]] | None = None

    def __init__(self, spec: OpSpec, args: tuple[Any, ...]) -> None:
        self.spec, self.args = spec, args
        self.inputs = inputs_of(spec, args)
        self.outputs = self.inputs if spec.outputs == spec.inputs else outputs_of(spec, args)
        self.name = name_of_operation(spec.kind, self.outputs if spec.inputs is None else self.inputs)
        self.op = operation_hook.hook.latest_reduce_op_of(spec, args)

    def queue(self) -> Any:
        """The queue in which a device executes the operations of a group; None on the CPU: nothing orders them."""
        tensors = (*self.inputs, *self.outputs)
        if any(tensor.is_cpu for tensor in tensors):
            return None
        return (id(operation_hook.group_of(self.spec, self.args)), *{tensor.device for tensor in tensors})

    def buffers(self) -> list[Buffer]:
        """The tensors. Writes are seen only where the backend does not count as one that writes."""
        if self.inputs is self.outputs:
            op = operation_hook.name_of_reduce_op(self.op)
            is_silent = self.spec.kind in _SILENT and (op is None or op in _PLAIN)
            is_sent = self._is_sent()
            return [Buffer.of(tensor, is_silent, is_sent) for tensor in self.inputs]
        own_inputs = _without_storages_of(self.outputs, self.inputs)
        buffers_of_inputs = [Buffer.of(tensor, True, is_input=True) for tensor in own_inputs]
        buffers_of_outputs = [Buffer.of(tensor, False) for tensor in self.outputs]
        return [*buffers_of_inputs, *buffers_of_outputs]

    def spans(self) -> tuple[list[Span], list[Span]]:
        """Locate the outputs, and the inputs that are no outputs, once."""
        if self._spans is None:
            self._spans = self._located()
        return self._spans

    def _located(self) -> tuple[list[Span], list[Span]]:
        inputs = pieces_of(self.inputs)
        if self._is_sent():
            return [], inputs
        if self.inputs is self.outputs:
            return inputs, []
        outputs = pieces_of(self.outputs)
        return outputs, [span for span in inputs if not do_overlap([span], outputs)]

    def _is_sent(self) -> bool:
        """Whether this rank only reads the tensors of an operation in place, as the root of a broadcast does."""
        spec, args = self.spec, self.args
        if spec.kind != "broadcast" or spec.root is None:
            return False
        rank: int = operation_hook.group_of(spec, args).rank()
        return bool(args[spec.root] == rank)


def _without_storages_of(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs that share no storage with an output."""
    written = {storage_of(tensor) for tensor in outputs}
    return [tensor for tensor in inputs if storage_of(tensor) not in written]


def _buffers_at_rest(tensors: Sequence[torch.Tensor]) -> list[Buffer]:
    """The tensors of an operation that no longer writes to them. All parts of a storage together have its version."""
    bytes_of: Counter[int] = Counter()
    for tensor in tensors:
        bytes_of[storage_of(tensor)] += tensor.nbytes
    return [Buffer.of(tensor, True, known=bytes_of[storage_of(tensor)]) for tensor in tensors]
