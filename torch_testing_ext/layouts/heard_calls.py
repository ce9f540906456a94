"""The collectives of a rank: what it hands over to each group, and in a diagnosis run each call with its line."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.tensors.pytrees import tree_leaves
from torch_testing_ext._torch.torch_frames import program_places
from torch_testing_ext.layouts.tensor_parts import bytes_of, copy_of_local
from torch_testing_ext.layouts.training_looks import ProbedCall, RankLooks

# What ranks other than the root hand over means nothing.
_OF_ROOT = ("broadcast", "scatter")


class HeardCalls:
    """A listener of all collectives."""

    def __init__(self, record: RankLooks):
        self._record = record
        # In a diagnosis run, the calls go here.
        self.order: list[Any] | None = None
        operation_hook.hook.tell(self)

    def before(self, spec: operation_hook.OpSpec, args: tuple[Any, ...]) -> None:
        group = operation_hook.group_of(spec, args)
        if self.order is not None:
            place = next(program_places(sys._getframe(2)), None)
            site = None if place is None else Site(*place)
            self.order.append(ProbedCall(f"{spec.kind} in a group of {group.size()}", site))
        if spec.inputs is not None and spec.kind not in _OF_ROOT:
            self._digest(tuple(dist.get_process_group_ranks(group)), args[spec.inputs])

    def _digest(self, members: tuple[int, ...], inputs: Any) -> None:
        known = self._record.given.get(members, 0)
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor):
                known = zlib.crc32(bytes_of(copy_of_local(tensor)), known)
        self._record.given[members] = known

    def after(self, spec: operation_hook.OpSpec, known: None, args: tuple[Any, ...], result: Any) -> None: ...

    def raised(self, known: None) -> None: ...
