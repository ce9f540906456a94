"""Checks of the tensors of an operation before it is issued.

They look at numbers that enter, and at outputs that are to be overwritten.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.tensors import tensor_values
from torch_testing_ext._torch.tensors.nested_tensors import tensors_in

from .flying_buffers import do_overlap, pieces_of

# Of --delays: this part of the ranks is slow; this part of their calls, and of the calls of others, is delayed.
_SLOW_RANKS, _SLOW_CALLS, _OTHER_CALLS = 0.3, 0.8, 0.2
# The longest delay, in seconds.
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
        op = operation_hook.name_of_reduce_op(operation_hook.hook.reduce_op_of(spec, args))
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
            # The outputs of other operations, and of the root, are inputs.
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
    """Whether several elements are at one place. Such a tensor cannot be filled."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in strides)
