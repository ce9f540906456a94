"""Modes that observe a step while it is traced: captured tensors, random operations, writes, and source lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import (
    disable_torch_function,
    dispatch_mode_class,
    inside_backward,
    is_fake,
    storage_key,
    tracing_graph,
    tree,
    values_unknown,
)

from ..spmd_errors import SPMDError, user_line

_tree = tree()
aten = torch.ops.aten
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class TraceWatch(dispatch_mode_class()):  # type: ignore[misc]
    """A mode that checks every operation of the step before the tracer records it, and annotates the recorded nodes."""

    def __init__(self, owned: frozenset[int] = frozenset(), inputs: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.restoring_rng = 0
        self.inside_autograd_grad = 0
        self.backwards = 0  # how many gradients of parameters have been computed
        self.owned, self.inputs = owned, inputs  # the storages of model and optimizers, and of inputs
        self.captured: dict[int, tuple[torch.Tensor, str | None]] = {}  # real tensors that the step used, and where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tracer's own code is of no interest to an observer, and by far the most that runs.
        observing = sys.getprofile()
        if not callable(observing):  # none, or a profiler written in C
            return self._dispatch(func, args, kwargs or {})
        sys.setprofile(None)
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            sys.setprofile(observing)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in _tree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is not aten.lift_fresh.default and func is not aten.lift_fresh_copy.default:
            self._note_captured(tensors)
        refuse_collective(func)
        if torch.Tag.inplace_view in func.tags and not is_fake(args[0]):
            raise SPMDError(
                f"The step changes the shape of a tensor that it captured from outside ({tuple(args[0].shape)}).",
                remedy="Compute with a view or a copy of the other shape.",
                where=user_line(),
            )
        if func.overloadpacket is aten.set_:
            raise SPMDError(
                "The step gives a tensor other memory (set_), which a graph cannot express.",
                remedy="Write in place, under torch.no_grad(): tensor.copy_(values).",
                where=user_line(),
            )
        if self.restoring_rng and draws(func, args, kwargs):
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
        # With a known value, the tracer would run a collective for real.
        is_collective = func.namespace.startswith("_c10d_functional")
        unknown = values_unknown(tensors) if is_collective else contextlib.nullcontext()
        with disable_torch_function(), unknown:  # calls below this point are not user code
            out = func(*args, **kwargs)
        if graph is not None:
            _annotate(graph, last)
        _refuse_sparse(out)
        return out

    def _note_captured(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not is_fake(tensor) and id(tensor) not in self.captured:
                _refuse_trainable(tensor)
                _refuse_shared(
                    tensor, self.owned, "a parameter, buffer or state (a view?)", "Create the view in the step"
                )
                _refuse_shared(tensor, self.inputs, "an input", "Use the step's argument instead")
                self.captured[id(tensor)] = tensor, user_line()

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


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers. Attention, for example, does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


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


def _refuse_trainable(tensor: torch.Tensor) -> None:
    if tensor.requires_grad or isinstance(tensor, DTensor):
        raise SPMDError(
            f"The step uses a trainable tensor of shape {tuple(tensor.shape)} that it captured from outside. Its "
            "gradient would be neither averaged nor kept.",
            remedy="Pass the module that owns it, and its optimizer, as arguments of the step.",
            where=user_line(),
        )


def _refuse_shared(tensor: torch.Tensor, storages: frozenset[int], whose: str, remedy: str) -> None:
    if tensor.layout is torch.strided and storage_key(tensor) in storages:
        raise SPMDError(
            f"The step uses a tensor of shape {tuple(tensor.shape)} that it captured from outside, and that shares the "
            f"memory of {whose}. The program would not see the step's changes in it.",
            remedy=f"{remedy}.",
            where=user_line(),
        )


def _refuse_sparse(out: Any) -> None:
    # Sparse gradients of parameters have an error of their own (see markers.py).
    if isinstance(out, torch.Tensor) and out.layout in _SPARSE and not inside_backward():
        raise SPMDError(
            "The step computes with a sparse tensor, for which the data-parallel program has no rules.",
            remedy="Use dense tensors in the step (sparse=False, to_dense()), or train it with DDP.",
            where=user_line(),
        )


def _annotate(graph: torch.fx.Graph, last: torch.fx.Node | None) -> None:
    where, backward, grad_mode = None, inside_backward(), torch.is_grad_enabled()
    for node in reversed(graph.nodes):
        if node is last:
            break
        where = where or user_line()
        node.meta["where"], node.meta["backward"], node.meta["grad_mode"] = where, backward, grad_mode


def refuse_collective(func: Any) -> None:
    """Refuse operations of `torch.distributed` that work in place, outside of what a graph describes."""
    if func.namespace == "c10d":
        raise collective_error(f"torch.distributed's {func._schema.name.removeprefix('c10d::').strip('_')}")


def collective_error(what: str) -> SPMDError:
    return SPMDError(
        f"The step calls {what}, which a graph cannot express.",
        remedy="Use its functional form, whose result is a new tensor (all_reduce, all_gather_tensor, broadcast, ...; "
        "from torch.distributed import _functional_collectives), or call it outside of the step.",
        where=user_line(),
    )
