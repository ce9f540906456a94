"""Outputs of modules and their gradients in one step, and the calls in between: looks of a diagnosis run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from torch_testing_ext._torch.compared_training import is_training
from torch_testing_ext._torch.tensors.pytrees import tree_leaves
from torch_testing_ext.layouts.heard_calls import HeardCalls
from torch_testing_ext.layouts.tensor_parts import Part, copy_of_local, is_dtensor, part_of_dtensor
from torch_testing_ext.layouts.training_looks import OUTPUT, OUTPUT_GRADIENT, ProbedCall, RankLooks, TensorLook


class ModuleProbe:
    """Keeps the first output of each call of each module in one step, with its gradient, and the calls in between."""

    def __init__(self, step: int, record: RankLooks, calls: HeardCalls):
        self._probed = step
        self._record = record
        self._step = 0
        # By module: an output and its gradient for each call.
        self._seen: dict[int, list[list[Any]]] = {}
        # What came: a kind, a module and the number of its call; or a collective.
        self._order: list[tuple[str, int, int] | ProbedCall] = []
        register_module_forward_hook(self._on_output)
        calls.order = self._order

    def _on_output(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._step != self._probed or not is_training():
            return
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        # A model that returns its loss, too, has a better one beside.
        tensor = next((each for each in tensors if each.dim()), tensors[0] if tensors else None)
        if tensor is None or not tensor.is_floating_point():
            return
        key, calls = id(module), self._seen.setdefault(id(module), [])
        call = len(calls)
        calls.append([tensor.detach(), None])
        self._order.append((OUTPUT, key, call))
        if tensor.requires_grad:
            hooked: Any = tensor
            hooked.register_hook(lambda gradient: self._on_gradient(key, call, gradient))

    def _on_gradient(self, module: int, call: int, gradient: Any) -> None:
        if gradient is None:
            return
        self._seen[module][call][1] = gradient.detach()
        self._order.append((OUTPUT_GRADIENT, module, call))

    def finish(self, names: dict[int, str], roots: Sequence[int], step: int) -> None:
        """Keep what a step has shown, by the names of modules, when it ends."""
        self._step = step + 1
        if step != self._probed or not self._seen:
            return
        forwards = max((len(self._seen[root]) for root in roots if root in self._seen), default=1)
        titles = {}
        for module, calls in self._seen.items():
            if module in names:
                # One forward of the model may call a module several times.
                each = max(1, len(calls) // forwards)
                for call in range(each):
                    title = names[module] + (f", call {call + 1}" if each > 1 else "")
                    titles[module, call] = title
                    self._keep(title, calls[call::each])
        for event in self._order:
            if isinstance(event, ProbedCall):
                self._record.order.append(event)
            else:
                kind, module, call = event
                each = max(1, len(self._seen[module]) // forwards)
                if (module, call % each) in titles:
                    self._record.order.append((kind, titles[module, call % each]))
        self._seen.clear()

    def _keep(self, title: str, calls: Sequence[Sequence[Any]]) -> None:
        """Join what the microbatches of a step had from one module."""
        for at, kind in enumerate((OUTPUT, OUTPUT_GRADIENT)):
            tensors = [call[at] for call in calls if call[at] is not None]
            if tensors:
                partial = part_of_dtensor(tensors[0]).partial if is_dtensor(tensors[0]) else ()
                local = [copy_of_local(each) for each in tensors]
                joined = torch.cat([each if each.dim() else each.reshape(1) for each in local])
                self._record.looks[self._probed, kind, title] = TensorLook(
                    joined, Part((None,), partial) if partial else None
                )
