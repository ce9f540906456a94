"""Checks of tensors: buffers in flight, numbers that enter, replicas that must be alike."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import random
import sys
import time
import traceback
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks_of_optimizers

from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.tensors import replicated_tensors, tensor_values
from torch_testing_ext._torch.tensors.nested_tensors import tensors_in
from torch_testing_ext._torch.tensors.replicated_tensors import Replica

from .failure import Site
from .sanitizer_findings import END, Look, Sum
from .sanitizer_log import looks_beside

# --------------------------------------------------------------------------------------------------------------------
# Buffers of work in flight: where they lie in memory, and what shows that one has been written.

# The addresses from the first to behind the last byte.
Span: TypeAlias = tuple[int, int]
# Of a tensor with gaps; one of more is not compared with others.
_MOST_PIECES = 64
# The pieces of an input and their bytes, by which a write is seen that torch does not count.
_SAMPLES, _SAMPLE = 64, 512


@dataclass(slots=True)
class Buffer:
    """A tensor in use, as it was when the operation was issued."""

    tensor: torch.Tensor
    # None if writes to other tensors of the same storage count as well.
    version: int | None
    address: int
    # Of samples of a tensor that nobody may write.
    digest: int | None = None
    # The line that has taken it as `.data`.
    site: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, counts: bool, is_input: bool = False, known: int | None = None) -> Buffer:
        """`counts`: torch's counter of writes does not count what the operation does. `known`: see `_version`."""
        version = _version(tensor, known) if counts else None
        return cls(tensor, version, _address(tensor), _digest(tensor) if is_input else None)

    @classmethod
    def alias(cls, tensor: torch.Tensor, site: int) -> Buffer:
        """A tensor that counts its own writes to the memory of a buffer."""
        return cls(tensor, tensor._version, _address(tensor), site=site)

    def what_happened(self) -> str:
        """Describe what has been done to it since: "" if nothing is known."""
        if self.address != _address(self.tensor):
            return "resized or freed"
        if self.version is not None and self.tensor._version != self.version:
            return "written through .data" if self.site else "written"
        if self.digest is not None and self.digest != _digest(self.tensor):
            return "written"
        return ""


def pieces_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The memory of tensors. A tensor with gaps has several pieces; of one with many, none is known."""
    return [piece for tensor in tensors for piece in _pieces(tensor)]


def _pieces(tensor: torch.Tensor) -> list[Span]:
    if not has_memory(tensor) or not tensor.numel():
        return []
    if tensor.is_contiguous():
        start = _address(tensor)
        return [(start, start + tensor.nbytes)] if start else []
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in strides)
    if extent <= tensor.numel():
        start = _address(tensor)
        return [(start, start + extent * tensor.element_size())] if start else []
    if tensor.shape[0] > _MOST_PIECES:
        return []
    pieces = pieces_of(tensor.detach().unbind(0))
    return pieces if len(pieces) <= _MOST_PIECES else []


def do_overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    for start, end in some:
        for other_start, other_end in others:
            if start < other_end and other_start < end:
                return True
    return False


def overlap_each_other(tensors: Sequence[torch.Tensor]) -> bool:
    """Do some of these tensors share memory?"""
    spans = sorted(pieces_of(tensors))
    return any(later[0] < earlier[1] for earlier, later in pairwise(spans))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if has_memory(tensor) else 0


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _version(tensor: torch.Tensor, known: int | None = None) -> int | None:
    """The version, which counts writes to all of a storage; None if the tensor is only a part of that.

    `known`: how many bytes of the storage are in use together with this tensor; unless given, its own.
    """
    if not has_memory(tensor) or tensor.is_inference():
        return None
    used = tensor.nbytes if known is None else known
    return tensor._version if tensor.untyped_storage().nbytes() == used else None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr() if has_memory(tensor) else 0
    except RuntimeError:  # a tensor without memory of its own: that of a trace, or a subclass
        return 0


def _digest(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes of a small tensor, and of samples of another one; None if they cannot be read here."""
    if tensor.device.type != "cpu" or not has_memory(tensor):
        return None
    if not tensor.numel() or not tensor.is_contiguous():
        return None
    return _checksum(tensor, _SAMPLES * _SAMPLE)


def digest_of_all(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes, on any device; None if they cannot be read here."""
    if not has_memory(tensor) or not tensor.numel() or not _address(tensor):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # Reading it would end the capture of a CUDA graph.
        return None
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.detach().cpu().contiguous()
    return _checksum(tensor)


def _checksum(tensor: torch.Tensor, most: int | None = None) -> int | None:
    """A digest of a contiguous tensor in the memory of this process; of one with more bytes, of samples."""
    address = _address(tensor)
    size = tensor.nbytes
    if not address:
        return None
    if most is None or size <= most:
        return zlib.crc32((ctypes.c_char * size).from_address(address))
    digest = 0
    sample = ctypes.c_char * _SAMPLE
    for number in range(_SAMPLES):
        offset = number * (size - _SAMPLE) // (_SAMPLES - 1)
        digest = zlib.crc32(sample.from_address(address + offset), digest)
    return digest


# --------------------------------------------------------------------------------------------------------------------
# Checks of the tensors of an operation before it is issued: numbers that enter, outputs that are to be overwritten.

# Of --shake: which part of the ranks is slow, which part of their calls and of those of others is delayed, by what.
_SLOW_RANKS, _SLOW_CALLS, _OTHER_CALLS = 0.3, 0.8, 0.2
# Seconds.
_LONGEST_DELAY = 0.02

# Writes a finding of the rank into its log: the kind, a sentence, the number of the line, and that of the line which
# has issued the operation, if that is another one.
Note = Callable[[str, str, int, int], None]


class Check:
    """Looks at each operation of a rank, before it is issued, and after that if it `wants_results`."""

    wants_results = False

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        """The operation is about to be issued at this line."""

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> Any:
        """It has been issued; it has this number in the log. Returns another result for its caller, or None."""

    def finish(self) -> None:
        """The test of this rank has returned."""


def inputs_of(spec: OpSpec, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [] if spec.inputs is None else _listed(args[spec.inputs])


def outputs_of(spec: OpSpec, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [] if spec.outputs is None else _listed(args[spec.outputs])


def _listed(value: Any) -> list[torch.Tensor]:
    if type(value) is list and len(value) == 1 and isinstance(value[0], torch.Tensor):
        # The most frequent argument by far.
        return [*value]
    return list(tensors_in(value))


def operation_in_words(spec: OpSpec, args: tuple[Any, ...]) -> str:
    """An operation for a sentence: its kind, and its tensors."""
    return name_of_operation(spec.kind, outputs_of(spec, args) if spec.inputs is None else inputs_of(spec, args))


def name_of_operation(kind: str, tensors: Iterable[torch.Tensor]) -> str:
    return _in_words(kind, tuple([(tensor.shape, tensor.dtype) for tensor in tensors]))


@functools.lru_cache(1024)
def _in_words(kind: str, kinds: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    shapes = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds]
    return " ".join([kind, *shapes])


def _is_root(spec: OpSpec, args: tuple[Any, ...], group: Any) -> bool:
    return spec.root is None or args[spec.root] == group.rank()


def describe_non_finite(tensor: torch.Tensor, op: str | None) -> str:
    """Count the elements of a tensor that are NaN or infinite, for a sentence; "" if none is.

    `op`: the reduction that they enter, in which an infinity may be what changes nothing.
    """
    counts = tensor_values.non_finite(tensor, tensor_values.neutral_of(op))
    if counts is None:
        return ""
    nans, infinities = counts
    parts = []
    if nans:
        parts.append(f"{nans} NaN")
    if infinities:
        parts.append(f"{infinities} infinite")
    return f"{' and '.join(parts)} of {tensor.numel()} elements"


class NanCheck(Check):
    """Finds a NaN or an infinity that enters an operation; once for each line."""

    def __init__(self, note: Note):
        self._note = note
        # The lines that it has noted.
        self._noted: set[int] = set()

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        if spec.inputs is None or site in self._noted:
            return
        if spec.kind in ("broadcast", "scatter") and not _is_root(spec, args, group):
            # Its tensors are overwritten.
            return
        op = operation_hook.name_of_reduce_op(operation_hook.reduce_op_of(spec, args))
        for tensor in inputs_of(spec, args):
            text = describe_non_finite(tensor, op)
            if text:
                self._note("nan", f"{text} enter {operation_in_words(spec, args)}", site, 0)
                self._noted.add(site)
                return


class Poison(Check):
    """Overwrites the outputs of an operation, so that parts that nobody writes show: floats by NaN."""

    def __init__(self, rank: int):
        self._rank = rank

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        if spec.outputs is None or operation_hook.is_without_data(group):
            return
        works_in_place = spec.outputs == spec.inputs
        if not works_in_place:
            self.overwrite(outputs_of(spec, args), inputs_of(spec, args))
        elif spec.kind == "broadcast" and not _is_root(spec, args, group):
            # Of other operations, and of the root, the outputs are inputs.
            self.overwrite(outputs_of(spec, args), ())

    def overwrite(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Overwrite the outputs that share no memory with an input."""
        read = pieces_of(inputs)
        for tensor in outputs:
            memory = pieces_of([tensor])
            if memory and not do_overlap(memory, read) and not _is_expanded(tensor):
                tensor_values.overwrite(tensor, self._pattern(tensor.dtype))

    def _pattern(self, dtype: torch.dtype) -> float | int | bool:
        """A number that no test expects, in each rank another one as far as the type has enough."""
        if dtype.is_floating_point or dtype.is_complex:
            return math.nan
        if dtype is torch.bool:
            return self._rank % 2 == 0
        if dtype.itemsize == 1:
            return 90 + self._rank % 32
        return 23_130 - self._rank


class Delays(Check):
    """Waits before operations for a time that follows from the seed, the rank and the number of the operation.

    A seed chooses some ranks to be slow throughout; the others are so now and then.
    """

    # Taken before a test could replace it.
    sleep = staticmethod(time.sleep)

    def __init__(self, seed: int, rank: int):
        self._random = random.Random(f"{seed} {rank}")
        self._is_slow = random.Random(f"{seed} {rank} slow").random() < _SLOW_RANKS

    def before(self, spec: OpSpec, args: tuple[Any, ...], site: int, group: Any) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait before the next operation of the rank, perhaps."""
        chance = self._random.random()
        share = self._random.random()
        share_of_calls = _SLOW_CALLS if self._is_slow else _OTHER_CALLS
        if chance < share_of_calls:
            self.sleep(share * _LONGEST_DELAY)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Are several elements at one place? Such a tensor cannot be filled."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in strides)


# --------------------------------------------------------------------------------------------------------------------
# Writes down digests of the tensors that all ranks of a group must hold alike, around each step of an optimizer.
#
# A look at a model is a line of JSON in a file beside the log. The parent compares the looks of all ranks at the end.

MOST_BYTES = 1 << 26
_NOT_COMPARED = ("fake", "threaded")


class ReplicaCheck(Check):
    """Looks at the models that an optimizer steps, before and after. It uses torch's own hooks, and removes them."""

    def __init__(self, log: Path, line: Callable[[], Site | None]):
        self._path = looks_beside(log)
        self._path.unlink(missing_ok=True)
        self._line = line
        # By owner and group.
        self._keys: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        # Models of a kind and group.
        self._made: Counter[str] = Counter()
        # By optimizer.
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        # By model.
        self._steps: Counter[str] = Counter()
        # Keeps the tensors of a look alive.
        self._latest: dict[str, tuple[list[Replica], Site | None]] = {}
        self._outermost: Any = None
        self._is_full = False
        self._pid = os.getpid()
        self._handles = [
            nn.modules.module.register_module_module_registration_hook(self._on_module),
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._before),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._after),
        ]

    def finish(self) -> None:
        """The test has returned: look once more, since ranks may have averaged after the last step."""
        for handle in self._handles:
            handle.remove()
        for model, (replicas, site) in self._latest.items():
            # A device that has failed.
            with suppress(RuntimeError):
                self._write(Look(model, END, site, _sums(replicas)))
        self._latest.clear()

    # -- hooks of torch

    def _on_module(self, owner: nn.Module, name: str, _: object) -> None:
        if name == "module" and isinstance(owner, DistributedDataParallel):
            self._key("DDP", owner, getattr(owner, "process_group", None))

    def _before(self, optimizer: Any, *_: object) -> None:
        if self._outermost is None or not _is_inside(self._outermost):
            self._outermost = optimizer
            self._look(optimizer, is_after=False)

    def _after(self, optimizer: Any, *_: object) -> None:
        # Others are a part of its step, as in ZeRO.
        if optimizer is self._outermost:
            self._outermost = None
            self._look(optimizer, is_after=True)

    # -- looks

    def _look(self, optimizer: Any, is_after: bool) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._pid:
            return
        for model, replicas in self._held_by(optimizer).items():
            if not is_after:
                self._steps[model] += 1
            point = 2 * self._steps[model] + is_after
            site = self._line()
            self._latest[model] = replicas, site
            self._write(Look(model, point, site, _sums(replicas)))

    def _held_by(self, optimizer: Any) -> dict[str, list[Replica]]:
        """The tensors of the models that an optimizer steps."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        replicas: dict[str, list[Replica]] = {}
        for owner, keys in list(self._keys.items()):
            if not isinstance(owner, DistributedDataParallel):
                continue
            if any(id(param) in stepped for param in owner.parameters()):
                for key in keys.values():
                    replicas[key] = replicated_tensors.tensors_of_ddp(owner)
        keys_of_groups: dict[Any, str | None] = {}
        for group, replica in replicated_tensors.dtensors_of(optimizer, lambda: self._names_of(optimizer)):
            if group not in keys_of_groups:
                keys_of_groups[group] = self._key(type(optimizer).__name__, optimizer, group)
            key_of_group = keys_of_groups[group]
            if key_of_group is not None:
                replicas.setdefault(key_of_group, []).append(replica)
        return replicas

    def _names_of(self, optimizer: Any) -> dict[int, str]:
        return self._names.get(optimizer) or self._names.setdefault(optimizer, replicated_tensors.names_around())

    def _key(self, kind: str, owner: Any, group: Any) -> str | None:
        """A text for the model of an owner that is alike on all members of the group; None if these do not meet."""
        known = _text_of_group(group)
        if known is None:
            return None
        keys = self._keys.setdefault(owner, {})
        if known not in keys:
            keys[known] = f"{kind} {self._made[kind + known]} {known}"
            self._made[kind + known] += 1
        return keys[known]

    def _write(self, look: Look) -> None:
        """Add a look to the file, unless that is too large. No descriptor stays, which a test could close."""
        with open(self._path, "a", encoding="utf-8") as file:
            full = file.tell() >= MOST_BYTES
            if full and not self._is_full:
                text = f"replicas are not compared from here on: their digests take {MOST_BYTES >> 20} MB ({look.site})"
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            if not full:
                file.write(json.dumps(look) + "\n")
            self._is_full = full


def _sums(replicas: list[Replica]) -> dict[str, Sum]:
    sums: dict[str, Sum] = {}
    for number, replica in enumerate(replicas):
        name = replica.name
        if name in sums:
            # Two models may use a name.
            name = f"{name}, tensor {number}"
        sums[name] = digest_of_all(replica.tensor), list(replica.tensor.shape), replica.is_buffer
    return sums


def _text_of_group(group: Any) -> str | None:
    number = None if group is None else made_groups.number_of_group(group)
    if number is None:
        return None
    made = made_groups.made_groups()
    record = made[number]
    if len(record.members) < 2 or record.backend in _NOT_COMPARED:
        return None
    earlier = [(other.name, other.world) for other in made[:number]]
    generation = earlier.count((record.name, record.world))
    return json.dumps([record.name, record.description, record.members, generation, record.world])


def _is_inside(optimizer: Any) -> bool:
    """Is a method of this optimizer being called? Its step may have raised, so that it has no end."""
    return any(frame.f_locals.get("self") is optimizer for frame, _ in traceback.walk_stack(sys._getframe(2)))
