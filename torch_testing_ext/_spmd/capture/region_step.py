"""Regions: the engine runs the step's Python, in which torch.compile compiles the modules' forward and the optimizers.

The first call is eager, and shows whether the step differentiates through gradients, for which regions have no code.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ..engine.engine_core import current_engine
from ..engine.engine_report import EngineReport
from ..engine.engine_step import EngineStep
from ..engine.state_finder import FoundState, find_state
from ..parallel_modes import DataParallel
from .captured_state import CallArguments
from .verification import VerifyMode, is_due, verified


class RegionStep(EngineStep):
    """A train step whose state is data parallel, with compiled regions from the second call on."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel, verify: VerifyMode) -> None:
        super().__init__(function, mode)
        self.verify, self.verified, self.why_eager = verify, 0, "it is the first call"
        self._regions: dict[int, tuple[Any, Any]] = {}  # by identity: an owner, and its compiled method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step, with the regions that it owns compiled."""
        engine = current_engine()
        if engine.stack:
            return super().__call__(*args, **kwargs)
        with engine.stack.entered(self):
            found = find_state(self.function, args, kwargs)
            eager = functools.partial(engine.run, self, self.mode, args, kwargs)
            history = engine.history_of(self)
            if not history.calls:
                with self._looking_for_create_graph():
                    return eager()
            compiled = functools.partial(self._run_compiled, eager, found)
            if self.why_eager or not is_due(self.verify, self.verified, history.number, history.calls):
                return (eager if self.why_eager else compiled)()
            together = engine.wire.world > 1 and any(history.rosters[-1].plans.values())
            tensors = CallArguments(args, kwargs, "cpu", None).tensors()
            result = verified(engine, found, tensors, together, eager, compiled, same_kernels=False)
            self.verified += 1
            return result

    def _run_compiled(self, eager: Callable[[], Any], found: FoundState) -> Any:
        with ExitStack() as stack:
            owners: list[Any] = [*found.modules, *found.optimizers]
            for owner in owners:
                name = "forward" if isinstance(owner, torch.nn.Module) else "step"
                if id(owner) not in self._regions:
                    self._regions[id(owner)] = owner, torch.compile(getattr(owner, name))
                    self._regions[id(owner)][1]._wrapped_by_lr_sched = True  # known to the engine: it may run on rows
                stack.enter_context(mock.patch.object(owner, name, self._regions[id(owner)][1]))
            return eager()

    @contextmanager
    def _looking_for_create_graph(self) -> Iterator[None]:
        self.why_eager = ""

        def watched(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if inspect.signature(function).bind(*args, **kwargs).arguments.get("create_graph"):
                    self.why_eager = "the step differentiates through gradients (create_graph)"
                return function(*args, **kwargs)

            return call

        watches = {name: watched(getattr(torch.autograd, name)) for name in ("backward", "grad")}
        with mock.patch.multiple(torch.autograd, **watches):
            yield

    def report(self) -> EngineReport:
        """Summarize the last call, as for the engine, and tell what is compiled."""
        report = super().report()
        how = f"eager: {self.why_eager}" if self.why_eager else f"compiled, verified {self.verified} times"
        return replace(report, optimizers=(*report.optimizers, f"forward and optimizers are {how}"))
