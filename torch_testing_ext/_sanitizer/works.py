"""Work that Python callers got: whether they wait for it, and what they do to its buffers before that.

Work that C++ keeps, such as that of DDP's reducer and of functional collectives, is not followed: its waits are in C++.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

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


@dataclass
class _OpenWork:
    """Work that nobody has waited for yet."""

    work: Any
    name: str
    site: int
    buffers: list[_Buffer]


class WaitCheck(Check):
    """Finds work that nobody waited for, and buffers that are written, resized or freed before the wait."""

    wants_results = True

    def __init__(self, note: Note):
        self._note = note
        self._open: dict[int, _OpenWork] = {}
        self._lock = threading.RLock()

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int) -> None:
        with self._lock:
            self._find_dropped()
            if hook.is_synchronous(spec, args) or not hook.is_called_by_distributed(sys._getframe(3)):
                return
            work = hook.work_of(result)
            if work is not None:
                self._open[id(work)] = _OpenWork(work, name_of(spec, args), site, _buffers(spec, args))

    def waited(self, work: Any) -> None:
        """Somebody waits for a work, or has been told that it is complete."""
        with self._lock:
            found = self._open.pop(id(work), None)
        if found is not None:
            self._check_buffers(found)

    def _check_buffers(self, found: _OpenWork) -> None:
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
        with self._lock:
            for found in self._open.values():
                self._unwaited(found)
            self._open.clear()

    def _unwaited(self, found: _OpenWork) -> None:
        self._note("unwaited", f"nobody waited for the work of {found.name}", found.site)


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


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided or tensor.is_meta else tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int | None:
    """The version, which counts writes to all of a storage; None if the tensor is only a part of that."""
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_meta:
        return None
    is_all = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor._version if is_all else None


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided or tensor.is_meta else tensor.data_ptr()
