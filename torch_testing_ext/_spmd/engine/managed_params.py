"""Parameters that the engine manages, and the hook by which each tells that a backward has reached it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._torch.spmd import outside_dynamo, run_hook_last

from ..param_layout import Layout


class ManagedParam:
    """One parameter of a data-parallel step.

    `plain` is the whole tensor that the step sees. `rest` is the DTensor that model and optimizers hold between calls,
    or None if they keep `plain`.
    """

    def __init__(self, plain: torch.Tensor, layout: Layout, name: str, rest: Any = None) -> None:
        self._plain = weakref.ref(plain)
        self._strong = plain if rest is not None else None
        self._rest = weakref.ref(rest) if rest is not None else None
        self.layout, self.name = layout, name
        self.kind = plain.shape, plain.dtype
        self.index = -1  # in no roster
        self.listener: Callable[[ManagedParam], None] | None = None  # hears of gradients
        self.kept: torch.Tensor | None = None  # the rank's rows of a gradient from an earlier call
        self.hooked: Any = None  # the handle of the hook
        self.at_rest = False  # no call has it as `plain`

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
        self._rest = weakref.ref(rest)
        _know(rest, lambda: self)

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

        plain.requires_grad_(True)  # a frozen parameter cannot get a hook, and the step may make it trainable
        self.hooked = plain.register_post_accumulate_grad_hook(report)
        plain.requires_grad_(trainable)

    def hook_last(self) -> bool:
        """Let other hooks, which may change the gradient, run before ours. Returns whether they did already."""
        plain = self.plain
        return plain is None or self.hooked is None or run_hook_last(plain, self.hooked)


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
    return find() if find is not None and reference is not None and reference() is tensor else None


def forget(managed: ManagedParam) -> None:
    """Let a parameter be as if no step had had it."""
    managed.listener = None
    for tensor in (managed.plain, managed.rest):
        _known.pop(id(tensor), None)


def manage(plain: torch.Tensor, layout: Layout, name: str, rest: Any = None) -> ManagedParam:
    managed = ManagedParam(plain, layout, name, rest)
    _know(plain, weakref.ref(managed) if rest is not None else lambda: managed)
    if rest is not None:
        _know(rest, lambda: managed)
    return managed
