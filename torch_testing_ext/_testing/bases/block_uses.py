"""The bytes of tensors that a rank computes and holds in a block, and the calls on their way meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_testing_ext._collectives.sanitizer.operation_checks import Check, outputs_of
from torch_testing_ext._collectives.sanitizer.sanitizer_log import ALL
from torch_testing_ext._testing.bases.world_values import RankUses
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.operations import operation_hook, tensor_uses, watched_waits, works
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.replacing import replaced
from torch_testing_ext._torch.tensors import nested_tensors


class BlockUses(RankUses):  # type: ignore[no-untyped-call]
    """Follows the tensors and operations of a block. Compiled code stays compiled."""

    def __init__(self) -> None:
        super().__init__(self.wait_over, lambda kind, text: None)
        self.is_following = False
        # Kernels that compute, and those among them that multiply matrices and the like.
        self._kernels = self._products = 0
        # Both, when a call was issued for which nobody has waited yet.
        self._open: dict[int, tuple[int, int]] = {}
        # Gathers of FSDP2, whose outputs nobody has used yet, and its latest reductions, by their kinds.
        self._unused: set[int] = set()
        self._reductions: dict[str, int] = {}
        # Both, between the issue of a call and the first wait for it.
        self._meanwhile: dict[int, tuple[int, int]] = {}
        # The calls that were on their way when the block ended, but for gathers that FSDP2 keeps for what follows.
        self.unfinished: frozenset[int] = frozenset()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Torch's compiler need not keep out (2.11 to 2.15)."""
        return True

    def issued(self, number: int, work: Any, outputs: Any) -> None:
        self._open[number] = self._kernels, self._products
        super().issued(number, work, outputs)

    def issued_by_fsdp2(self, number: int, spec: OpSpec) -> None:
        """FSDP2 waits when it uses what is gathered, and for a reduction before the next one of its kind."""
        if spec.op is None:
            self._unused.add(number)
            return
        if spec.kind in self._reductions:
            self.wait_over(self._reductions[spec.kind])
        self._reductions[spec.kind] = number
        self.awaited_after_backward(number)

    def wait_over(self, number: int) -> None:
        """Somebody waits for a call, or for all."""
        for each in list(self._open) if number == ALL else [number]:
            kernels, products = self._open.pop(each, (None, 0))
            if kernels is not None:
                self._meanwhile[each] = self._kernels - kernels, self._products - products

    def end(self) -> None:
        """The block has ended."""
        self.is_following = False
        self.unfinished = frozenset(self._open) - self._unused
        self.wait_over(ALL)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        if self._unused and not tensor_uses.is_view(func):
            for number in {self.issuer_of(tensor) for tensor in nested_tensors.tensors_in((args, kwargs))}:
                if number in self._unused:
                    self._unused.discard(number)
                    self.wait_over(number)

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace == "c10d":
            # `issued` has noted its outputs.
            return
        if tensor_uses.computes(func):
            given = nested_tensors.tensors_in((args, kwargs))
            if any(tensor.is_floating_point() or tensor.is_complex() for tensor in given):
                self._kernels += 1
                self._products += tensor_uses.multiplies(func)
        super().after(func, args, kwargs, result)

    def overlapped(self) -> frozenset[int]:
        """The calls, by their numbers, that are on their way while the rank computes.

        Where the block multiplies matrices, only such computation counts.
        """
        at = 1 if self._products else 0
        return frozenset(number for number, between in self._meanwhile.items() if between[at])


class IssuedWorks(Check):
    """Tells which call has issued which work."""

    wants_results = True

    def __init__(self, uses: BlockUses):
        self._uses = uses

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> None:
        if not self._uses.is_following:
            return
        is_awaited = operation_hook.is_synchronous(spec, args)
        self._uses.issued(number, None if is_awaited else works.work_of(result), outputs_of(spec, args))
        issuer = torch_frames.issuer_of(sys._getframe(2))
        if torch_frames.is_of_fsdp2(issuer):
            self._uses.issued_by_fsdp2(number, spec)
        elif is_awaited or torch_frames.is_awaited_in_cpp(issuer):
            self._uses.wait_over(number)
        elif torch_frames.is_of_reducer(issuer):
            self._uses.awaited_after_backward(number)


@contextmanager
def followed(uses: BlockUses) -> Iterator[None]:
    """Follow operations and waits in this context, beside who does that already."""
    listener = watched_waits.WaitListener(uses.waited)
    watched_waits.hooks.tell(listener)
    try:
        with replaced("sizes of storages", lambda name, resize: uses.watched_resize(resize)), uses:
            uses.is_following = True
            yield
    finally:
        uses.end()
        watched_waits.hooks.leave(listener)
