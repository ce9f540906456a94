"""Work that Python callers got: whether they wait for it, and what they do to its buffers before that.

Work that C++ keeps, such as that of DDP's reducer and of functional collectives, is not followed: its waits are in C++.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torch_testing_ext._torch import hook
from torch_testing_ext._torch.hook import OpSpec

from .checks import Check, Note, name_of, tensors_of

# References to a work that only this module has: that of the table, and that of the argument of sys.getrefcount.
_OURS = 2
# In these, gloo writes to the memory of its tensors only. Elsewhere it copies tensors, which counts as a write.
_SILENT = ("all_reduce", "broadcast", "reduce")
_PLAIN = ("sum", "product", "min", "max", "band", "bor", "bxor")


@dataclass
class _Buffer:
    """A tensor in use, as it was when the operation was issued."""

    tensor: torch.Tensor
    version: int | None  # None if writes to other tensors of the same storage count as well
    address: int


_Span: TypeAlias = tuple[int, int]  # the addresses from the first to behind the last byte


@dataclass
class _OpenWork:
    """Work that nobody has waited for yet."""

    work: Any
    name: str
    site: int
    buffers: list[_Buffer]
    outputs: list[_Span]
    inputs: list[_Span]  # without outputs
    is_told: bool = False  # a finding about its buffers has been made


class WaitCheck(Check):
    """Finds work that nobody waited for, and buffers that are written, resized or freed before the wait."""

    wants_results = True

    def __init__(self, note: Note, site: Callable[[], int] | None = None):
        """`site`: the number of the line that runs now, to find the uses of buffers when they happen."""
        self._note = note
        self._site = site
        self._uses: Any = None
        self._is_issuing = False
        self._open: dict[int, _OpenWork] = {}
        self._lock = threading.RLock()

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int) -> None:
        with self._lock:
            self._find_dropped()
            if hook.is_synchronous(spec, args) or not _is_for_caller(hook.issuer_of(sys._getframe(3))):
                return
            work = hook.work_of(result)
            if work is not None:
                outputs, inputs = _spans(spec, args) if self._uses is not None else ([], [])
                self._open[id(work)] = _OpenWork(work, name_of(spec, args), site, _buffers(spec, args), outputs, inputs)

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """A rank that is a thread takes part in an operation: what that does to tensors is no use of a buffer."""
        with self._lock:
            buffers = [buffer for found in self._open.values() for buffer in found.buffers]
        watched = [buffer for buffer in buffers if buffer.version is not None]
        untouched = [buffer for buffer in watched if buffer.version == buffer.tensor._version]
        self._is_issuing = True
        try:
            yield
        finally:
            self._is_issuing = False
            for buffer in untouched:
                buffer.version = buffer.tensor._version

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
                written = {_storage(tensor) for tensor in outputs}
                own = [tensor for tensor in inputs if _storage(tensor) not in written]
                buffers = [*_buffers_at_rest(outputs), *_buffers_at_rest(own)]
                self._open[id(work)] = _OpenWork(work, name, site, buffers, _spans_of(outputs), _spans_of(own))

    def waited(self, work: Any) -> None:
        """Somebody waits for a work, or has been told that it is complete."""
        with self._lock:
            found = self._open.pop(id(work), None)
        if found is not None:
            self._check_buffers(found)

    def watch_uses(self) -> None:
        """From now on, look at each operation of this thread."""
        self._uses = hook.TensorUses(self._on_use)
        self._uses.__enter__()

    def _on_use(self, operation: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        if not self._open or self._is_issuing:
            return
        with self._lock:
            for found in self._open.values():
                if not found.is_told and (how := _use_of(found, read, written)):
                    found.is_told = True
                    site = self._site() if self._site is not None else found.site
                    self._note("race", f"a buffer of {found.name} was {how} by {operation} before wait()", site)

    def _check_buffers(self, found: _OpenWork) -> None:
        if found.is_told:
            return
        for buffer in found.buffers:
            if buffer.address != _address(buffer.tensor):
                self._note("race", f"a buffer of {found.name} was resized or freed before wait()", found.site)
            elif buffer.version is not None and buffer.tensor._version != buffer.version:
                self._note("race", f"a buffer of {found.name} was written before wait()", found.site)
            else:
                continue
            return

    def _find_dropped(self) -> None:
        """The caller of the latest operation has its work by now; one that nobody has any more is not waited for."""
        for number in list(self._open):
            found = self._open[number]
            # `found` has one, and so has the argument.
            if sys.getrefcount(found.work) <= _OURS:
                del self._open[number]
                self._unwaited(found)

    def finish(self) -> None:
        if self._uses is not None:
            self._uses.__exit__(None, None, None)
            self._uses = None
        with self._lock:
            for found in self._open.values():
                self._unwaited(found)
            self._open.clear()

    def _unwaited(self, found: _OpenWork) -> None:
        self._note("unwaited", f"nobody waited for the work of {found.name}", found.site)


def _is_for_caller(issuer: Any) -> bool:
    """Does the function that issues an operation give its work to a caller in Python, which must wait for it?"""
    return hook.is_called_by_distributed(issuer) and not hook.is_for_join(issuer)


def _buffers(spec: OpSpec, args: tuple[Any, ...]) -> list[_Buffer]:
    """The tensors of an operation. Writes are seen only where the backend does not count as one that writes."""
    inputs = [] if spec.inputs is None else list(tensors_of(args[spec.inputs]))
    if spec.inputs == spec.outputs:
        is_silent = spec.kind in _SILENT and (spec.op is None or hook.name_of_reduce_op(args[spec.op].op()) in _PLAIN)
        return [_Buffer(tensor, _version(tensor) if is_silent else None, _address(tensor)) for tensor in inputs]
    outputs = [] if spec.outputs is None else list(tensors_of(args[spec.outputs]))
    written = {_storage(tensor) for tensor in outputs}
    own = [one for one in inputs if _storage(one) not in written]
    return [
        *(_Buffer(tensor, _version(tensor), _address(tensor)) for tensor in own),
        *(_Buffer(tensor, None, _address(tensor)) for tensor in outputs),
    ]


def _buffers_at_rest(tensors: Sequence[torch.Tensor]) -> list[_Buffer]:
    """The tensors of an operation that no longer writes to them. All parts of a storage together have its version."""
    bytes_of: dict[int, int] = {}
    for tensor in tensors:
        bytes_of[_storage(tensor)] = bytes_of.get(_storage(tensor), 0) + tensor.numel() * tensor.element_size()
    return [_Buffer(tensor, _version(tensor, bytes_of[_storage(tensor)]), _address(tensor)) for tensor in tensors]


def _spans_of(tensors: Sequence[torch.Tensor]) -> list[_Span]:
    return [_span(tensor) for tensor in tensors]


def _spans(spec: OpSpec, args: tuple[Any, ...]) -> tuple[list[_Span], list[_Span]]:
    """Locate the outputs of an operation, and the inputs that are no outputs."""
    inputs = [] if spec.inputs is None else _spans_of(list(tensors_of(args[spec.inputs])))
    outputs = [] if spec.outputs is None else _spans_of(list(tensors_of(args[spec.outputs])))
    if spec.kind == "broadcast" and spec.root is not None and args[spec.root] == hook.group_of(spec, args).rank():
        return [], inputs
    return outputs, [one for one in inputs if not _overlap(one, outputs)]


def _use_of(found: _OpenWork, read: list[torch.Tensor], written: list[torch.Tensor]) -> str:
    """Describe how an operation uses a buffer that is in flight: "" if it does not, or only reads an input."""
    if any(_overlap(_span(tensor), [*found.outputs, *found.inputs]) for tensor in written):
        return "written"
    return "read" if any(_overlap(_span(tensor), found.outputs) for tensor in read) else ""


def _span(tensor: torch.Tensor) -> _Span:
    if not _has_memory(tensor) or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own: that of a trace, or a subclass
        return 0, 0
    return start, start + (last + 1) * tensor.element_size()


def _overlap(one: _Span, others: list[_Span]) -> bool:
    return any(one[0] < other[1] and other[0] < one[1] for other in others)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _has_memory(tensor) else 0


def _version(tensor: torch.Tensor, known: int | None = None) -> int | None:
    """The version, which counts writes to all of a storage; None if the tensor is only a part of that.

    `known`: how many bytes of the storage are in use together with this tensor; unless given, its own.
    """
    if not _has_memory(tensor) or tensor.is_inference():
        return None
    used = tensor.numel() * tensor.element_size() if known is None else known
    return tensor._version if tensor.untyped_storage().nbytes() == used else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if _has_memory(tensor) else 0


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
