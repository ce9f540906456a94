"""Sharded parameters while a step is recorded: whole for the step, the rank's rows for optimizers that work by element.

The rows are the graph's input. Whole parameters are gathered from them; what is written to one form is copied to the
other before that is read. Copies that nothing reads are removed when the graph is cleaned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.row_optimizers import rekey
from ..lower.graphs import GATHER, ROWS
from ..param_layout import Layout


class ShardedLeaf:
    """One parameter in both forms: `rows`, and the leaf `whole`, which is gathered from them."""

    def __init__(self, number: int, rows: torch.Tensor, layout: Layout) -> None:
        self.number, self.rows = number, rows
        self.shape, self.local_shape = list(layout.shape), list(layout.local_shape)
        self.whole: torch.Tensor = self.gathered(rows).detach()

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = GATHER(rows, self.number, self.shape)
        return whole

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = ROWS(whole.detach(), self.number, self.local_shape)
        return rows

    def push(self) -> None:
        """Copy the whole parameter to the rows. Cleaning removes this if the step has not written to it."""
        self.rows.copy_(self.rows_of(self.whole))


class RowUpdates:
    """Lets an optimizer, which works by element, update rows while a step is recorded."""

    def __init__(self, optimizer: Optimizer, leaves: dict[int, ShardedLeaf]) -> None:
        self.optimizer = optimizer
        self._inner: Any = optimizer.step
        self._leaves = leaves  # by the identity of the whole parameter

    def install(self) -> None:
        """Replace the optimizer's step. Whoever calls this restores the optimizer."""

        def step(closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad(), self._on_rows():
                result = self._inner()
            return result if closure is None else loss

        if hasattr(self._inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.__dict__["step"] = step

    @contextmanager
    def _on_rows(self) -> Iterator[None]:
        """Let the optimizer see the rows of parameters instead of the whole ones."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        used = [self._leaves[id(param)] for param in params if id(param) in self._leaves]
        rows_of = {id(leaf.whole): leaf.rows for leaf in used}
        whole_of = {id(leaf.rows): leaf.whole for leaf in used}
        for leaf in used:
            leaf.push()
            leaf.rows.grad = None if leaf.whole.grad is None else leaf.rows_of(leaf.whole.grad)
        rekey(self.optimizer, lambda param: rows_of.get(id(param), param))
        yield
        rekey(self.optimizer, lambda param: whole_of.get(id(param), param))
        for leaf in used:
            if leaf.rows.grad is not None:
                leaf.rows.grad = None
                leaf.whole.copy_(leaf.gathered(leaf.rows))
