"""Verification: a new program's first call also runs the step eagerly, with DDP's semantics, and compares the two.

All ranks verify in the same call, because both runs communicate. If they differ anywhere, all ranks undo the call and
raise an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..spmd_errors import SPMDError
from ..trace.train_state import StepState
from .call_plan import CallPlan
from .comparison import Comparison, StepRecord, record
from .eager import EagerCopy, Predecessors
from .snapshot import RandomState, StateSnapshot, TensorValues

VerifyMode = Literal["first", "always", "off"]
# Verification needs two copies of the whole state. Models whose state is larger are not verified.
LIMIT_BYTES = 1 << 30


def too_large(state: StepState) -> str | None:
    """Why a model is not verified, if its state is too large. All ranks come to the same answer."""
    tensors: list[torch.Tensor] = [ref.value for ref in (*state.params, *state.buffers)]
    tensors += [ref.value.grad for ref in state.params if ref.value.grad is not None]
    tensors += [t for entry in state.optimizer_states() for t in entry.leaves if isinstance(t, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size <= LIMIT_BYTES:
        return None
    return f"its state of {size / 2**30:.1f} GiB exceeds the limit of {LIMIT_BYTES / 2**30:.1f} GiB"


class Verification:
    """One call that runs a step both ways. `snapshot` is the state to go back to if they differ."""

    def __init__(self, plan: CallPlan, snapshot: StateSnapshot | None, predecessors: Predecessors) -> None:
        self.plan, self.predecessors = plan, predecessors
        self.state, self.layouts = plan.binding.state, plan.binding.layouts
        # Programs that do not communicate are each rank's own affair.
        self.group = None if plan.handshake is None else plan.mesh.get_group()
        self.snapshot = snapshot
        self.seconds = 0.0

    def run(self, step: Callable[[], Any], compiled: Callable[[], Any], leaves: list[Any]) -> Any:
        """Run the step both ways; return the result of the compiled one, or raise an error on all ranks."""
        begin = time.perf_counter()
        snapshot = self.snapshot or StateSnapshot(self.state)
        inputs = TensorValues([*leaves, *self._captured()])
        try:
            theirs = self._eager(step, inputs)
            self.seconds = time.perf_counter() - begin
            result = compiled()
        except BaseException:
            snapshot.restore()
            inputs.restore()
            raise
        begin = time.perf_counter()
        params = [ref.value for ref in self.state.params]
        mine = record(result, self.state, self.layouts, params, [ref.value for ref in self.state.buffers])
        scale = 10.0 if self.plan.compiled else 1.0
        found = Comparison(self.state, self.layouts, scale).first_difference(mine, theirs)
        differences = {dist.get_rank(): found}
        if self.group is not None:
            gathered: list[Any] = [None] * self.group.size()
            dist.all_gather_object(gathered, found, group=self.group)
            differences = dict(enumerate(gathered))
        for rank, difference in differences.items():
            if difference is not None:
                snapshot.restore()
                inputs.restore()
                raise _mismatch(difference, rank)
        self.seconds += time.perf_counter() - begin
        return result

    def _captured(self) -> list[torch.Tensor]:
        """The tensors that the step captured, which a run may write to."""
        module = self.plan.program.graph
        nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
        values = [getattr(module, str(node.target), None) for node in nodes]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _captured_generators(self) -> list[torch.Generator]:
        """The random generators that the step captured."""
        module = self.plan.program.graph
        arguments = [leaf for node in module.graph.nodes for leaf in (*node.args, *node.kwargs.values())]
        attributes = [getattr(module, str(n.target), None) for n in module.graph.nodes if n.op == "get_attr"]
        found = [value for value in (*arguments, *attributes) if isinstance(value, torch.Generator)]
        return list({id(generator): generator for generator in found}.values())

    def _eager(self, step: Callable[[], Any], inputs: TensorValues) -> StepRecord:
        copy = EagerCopy(self.state, self.predecessors, self.group)
        generators = RandomState(self.state.device, self._captured_generators())
        try:
            with copy.installed():
                result = step()
                params = [param for param, _, _ in copy.params]
                return record(result, self.state, self.layouts, params, list(self._current_buffers()))
        finally:
            inputs.restore()
            generators.restore()

    def _current_buffers(self) -> Iterator[Any]:
        for ref in self.state.buffers:
            yield ref.slots[0].module._buffers.get(ref.slots[0].name)


def _mismatch(difference: str, rank: int) -> SPMDError:
    return SPMDError(
        f"The compiled step is not equivalent to the eager step under DDP: {difference}, on rank {rank}. Both were run "
        "on the same batch; the call has been undone.",
        remedy="The step depends on something that the compiler cannot see, or that it gets wrong: train it with DDP. "
        'Or pass compile(verify="off") if the difference does not matter.',
    )
