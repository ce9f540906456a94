"""Modes that observe a step while it is traced: captured tensors, random operations, writes, and source lines."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch import (
    disable_torch_function,
    dispatch_mode_class,
    inside_backward,
    is_fake,
    storage_key,
    tracing_graph,
    tree,
)

from ..errors import SPMDError, user_line
from .markers import NEUTRAL

_tree = tree()
aten = torch.ops.aten


class TraceWatch(dispatch_mode_class()):  # type: ignore[misc]
    """A mode that checks every operation of the step before the tracer records it, and annotates the recorded nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: Counter[int] = Counter()  # per storage
        self.restoring_rng = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in _tree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        _refuse_captured(tensors)
        if self.restoring_rng and torch.Tag.nondeterministic_seeded in func.tags:
            raise SPMDError(
                f"{func} draws random numbers in a region that restores the generator's state (checkpointing with "
                "dropout?). The traced program would draw different numbers when it recomputes the region, and the "
                "gradients would be wrong.",
                remedy="Keep random operations out of checkpointed regions, or pass preserve_rng_state=False if the "
                "recomputed numbers may differ.",
                where=user_line(),
            )
        graph = tracing_graph()
        last = next(iter(reversed(graph.nodes)), None) if graph is not None else None
        with disable_torch_function():  # calls below this point are not user code
            out = _extreme_of_empty(func, args, kwargs) if func in _EXTREMES else None
            out = func(*args, **kwargs) if out is None else out
        if graph is not None:
            _annotate(graph, last)
        if func._schema.is_mutable:
            self._count_writes(func, args, kwargs)
        return out

    def _count_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for value in written_arguments(func, args, kwargs):
            for leaf in _tree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self.writes[storage_key(leaf)] += 1

    @contextlib.contextmanager
    def detect_fork_rng(self) -> Iterator[None]:
        """Detect regions that restore the random generator's state, which a traced program cannot do."""
        original = torch.random.fork_rng

        @contextlib.contextmanager
        def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
            enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
            self.restoring_rng += bool(enabled)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                self.restoring_rng -= bool(enabled)

        torch.random.fork_rng = fork_rng
        try:
            yield
        finally:
            torch.random.fork_rng = original


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that `func` writes to, according to its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                written.append(kwargs[argument.name])
            elif position < len(args) and not argument.kwarg_only:
                written.append(args[position])
    return written


def _order(args: Any, kwargs: Any) -> float:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return 2.0 if order is None else float(order)


_NEUTRAL_NORMS = {math.inf: 0.0, -math.inf: math.inf}
_EXTREMES: dict[Any, Callable[[Any, Any], float | None]] = {
    aten.max.default: lambda args, kwargs: -math.inf,
    aten.min.default: lambda args, kwargs: math.inf,
    aten.amax.default: lambda args, kwargs: -math.inf,
    aten.amin.default: lambda args, kwargs: math.inf,
    aten._foreach_max.default: lambda args, kwargs: -math.inf,
    aten.linalg_vector_norm.default: lambda args, kwargs: _NEUTRAL_NORMS.get(_order(args, kwargs)),
    aten._foreach_norm.Scalar: lambda args, kwargs: _NEUTRAL_NORMS.get(_order(args, kwargs)),
}
_SINGLE = {aten._foreach_max.default: aten.max.default, aten._foreach_norm.Scalar: aten.linalg_vector_norm.default}


def _extreme_of_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """The maximum or minimum where some tensor is empty, as is one rank's shard of an uneven parameter; else None."""
    tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    neutral = _EXTREMES[func](args, kwargs)
    if neutral is None or all(tensor.numel() for tensor in tensors):
        return None
    single = _SINGLE.get(func, func)
    results = [single(t, *args[1:], **kwargs) if t.numel() else NEUTRAL(t, neutral) for t in tensors]
    return results if func in _SINGLE else results[0]


def _refuse_captured(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if not is_fake(tensor) and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
            raise SPMDError(
                f"The step uses a trainable tensor of shape {tuple(tensor.shape)} that it captured from outside. Its "
                "gradient would be neither averaged nor kept.",
                remedy="Pass the module that owns it, and its optimizer, as arguments of the step.",
                where=user_line(),
            )


def _annotate(graph: torch.fx.Graph, last: torch.fx.Node | None) -> None:
    where, backward = None, inside_backward()
    for node in reversed(graph.nodes):
        if node is last:
            break
        where = where or user_line()
        node.meta["where"], node.meta["backward"] = where, backward


_NON_COMPUTING = {
    torch.Tensor.detach,
    torch.Tensor.backward,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.get_device,
    torch.Tensor.__hash__,
    torch.Tensor.__len__,
    torch.Tensor.__repr__,
    torch.Tensor.untyped_storage,
    torch.Tensor.data_ptr,
    torch.autograd.grad,
    torch.autograd.backward,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_COMPUTING_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}


class WholeParameterMode(TorchFunctionMode):
    """Substitutes the whole parameter for a shard from `module.parameters()` in differentiable code.

    A penalty on the parameters thus has the same value and gradient as under DDP. In code without gradients
    (optimizers, clipping) shards stay shards; see `lower/shard_flow.py`.
    """

    def __init__(self, whole_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.whole_of = whole_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and _computes(func):
            args, kwargs = _tree.tree_map_only(torch.Tensor, self._substitute, (args, kwargs))
        return func(*args, **kwargs)

    def _substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self.whole_of(tensor)
        return tensor if whole is None else whole


def _computes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return name == "__get__" and getattr(func.__self__, "__name__", "") in _COMPUTING_PROPERTIES
    return func not in _NON_COMPUTING and not name.endswith("_like") and not name.startswith("new_")
