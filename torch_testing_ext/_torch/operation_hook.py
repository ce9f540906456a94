"""A hook on every operation of c10d, and the functions that put parts of tensors together."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from . import flight_recorder
from .flight_recorder import is_of_torch

# --------------------------------------------------------------------------------------------------------------------
# A hook on every operation of c10d: eager calls, DDP's reducer, FSDP and compiled code all end in one.
#
# The kernels are Python functions on the dispatch key BackendSelect, which comes just before the backends. They are
# installed for as long as some rank is sanitized, and removed again.

_DISTRIBUTED = "distributed_c10d.py"
_NOTED_IN = flight_recorder.__file__
_AROUND_CALLS = (_DISTRIBUTED, "c10d_logger.py")
# The functions of torch that tell ranks without inputs that this one goes on: 2.11 to 2.15.
_FOR_JOIN = {
    "notify_join_context": os.path.join("distributed", "algorithms", "join.py"),
    "_check_global_requires_backward_grad_sync": os.path.join("nn", "parallel", "distributed.py"),
}
# torch has its compiler leave modes alone by two functions around each: 2.11 to 2.15.
_AROUND_MODES = (os.path.join("torch", "_compile.py"), os.path.join("_dynamo", "eval_frame.py"))


@dataclass(frozen=True)
class OpSpec:
    """The meaning of an operation's arguments: the places of those that matter, None for those that it has not.

    `inputs` and `outputs` may be tensors, lists or lists of lists; where an operation works in place they are the same.
    """

    name: str
    kind: str
    group: int
    inputs: int | None = None
    outputs: int | None = None
    op: int | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    splits: int | None = None  # of the output; those of the input follow
    timeout: int | None = None

    @property
    def is_p2p(self) -> bool:
        return self.kind in ("send", "recv")


class Listener(Protocol):
    """Hears of each operation before it is issued, and how that went."""

    def before(self, spec: OpSpec, args: tuple[Any, ...]) -> Any:
        """Returns what the other methods are given, by which they know the operation."""

    def after(self, spec: OpSpec, known: Any, args: tuple[Any, ...], result: Any) -> Any:
        """It has been issued; it may still be running. Returns another result for its caller, or None."""

    def raised(self, known: Any) -> None:
        """It has not been issued, because it raised."""


# By the name of the operation: kind, group, inputs, outputs, and what else it has. All of 2.11 to 2.15.
_IN_PLACE = {"group": 1, "inputs": 0, "outputs": 0}
_OUT_OF_PLACE = {"group": 2, "inputs": 1, "outputs": 0}
_REDUCED = {**_OUT_OF_PLACE, "op": 3, "timeout": 5}
_KNOWN: dict[str, dict[str, Any]] = {
    "allreduce_": {"kind": "all_reduce", **_IN_PLACE, "op": 2, "timeout": 5},
    "allreduce_coalesced_": {"kind": "all_reduce_coalesced", **_IN_PLACE, "op": 2, "timeout": 4},
    "broadcast_": {"kind": "broadcast", **_IN_PLACE, "root": 2, "timeout": 5},
    "reduce_": {"kind": "reduce", **_IN_PLACE, "op": 2, "root": 3, "timeout": 6},
    "allgather_": {"kind": "all_gather", **_OUT_OF_PLACE, "timeout": 4},
    "_allgather_base_": {"kind": "all_gather_into_tensor", **_OUT_OF_PLACE, "timeout": 4},
    "allgather_coalesced_": {"kind": "all_gather_coalesced", **_OUT_OF_PLACE},
    "allgather_into_tensor_coalesced_": {"kind": "all_gather_into_tensor_coalesced", **_OUT_OF_PLACE},
    "gather_": {"kind": "gather", **_OUT_OF_PLACE, "root": 3, "timeout": 5},
    "gather_into_tensor_": {"kind": "gather_into_tensor", **_OUT_OF_PLACE, "root": 3, "timeout": 5},
    "scatter_": {"kind": "scatter", **_OUT_OF_PLACE, "root": 3, "timeout": 5},
    "reduce_scatter_": {"kind": "reduce_scatter", **_REDUCED},
    "_reduce_scatter_base_": {"kind": "reduce_scatter_tensor", **_REDUCED},
    "reduce_scatter_tensor_coalesced_": {"kind": "reduce_scatter_tensor_coalesced", **_REDUCED},
    "alltoall_": {"kind": "all_to_all", **_OUT_OF_PLACE, "timeout": 4},
    "alltoall_base_": {"kind": "all_to_all_single", **_OUT_OF_PLACE, "splits": 3, "timeout": 6},
    "barrier": {"kind": "barrier", "group": 1, "timeout": 4},
    "monitored_barrier_": {"kind": "monitored_barrier", "group": 1, "timeout": 3},
    "send": {"kind": "send", "group": 1, "inputs": 0, "peer": 2, "tag": 3},
    "recv_": {"kind": "recv", "group": 1, "outputs": 0, "peer": 2, "tag": 3},
    "recv_any_source_": {"kind": "recv", "group": 1, "outputs": 0, "tag": 2},
}

_listener: Listener | None = None
_library: Any = None


def can_hook() -> str | None:
    """Why the operations of c10d cannot be hooked here; None if they can.

    `_dispatch_keyset_full_after`, `redispatch_boxed`, `_jit_get_all_schemas`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return "this torch is built without torch.distributed"
    for owner, name in ((torch._C, "_dispatch_keyset_full_after"), (torch._C, "_jit_get_all_schemas")):
        if not hasattr(owner, name):
            return f"this torch has no torch._C.{name}"
    return None if _specs() else "this torch has no operations of c10d that are known here"


def _specs() -> list[OpSpec]:
    """The operations that take a process group. Of those that are not known here, only that they were issued."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("c10d::"):
            continue
        name = schema.name.partition("::")[2]
        groups = [at for at, argument in enumerate(schema.arguments) if "c10d.ProcessGroup" in str(argument.type)]
        if name in _KNOWN:
            found.append(OpSpec(name, **_KNOWN[name]))
        elif groups:
            found.append(OpSpec(name, name.strip("_"), groups[0]))
    return found


def is_installed() -> bool:
    return _library is not None


def install() -> None:
    """Hook all operations. Until there is a listener, they only pass through."""
    global _library
    if _library is None:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for spec in _specs():
            library.impl(spec.name, _kernel(spec), "BackendSelect", with_keyset=True)
        _library = library


def remove() -> None:
    global _library, _listener
    if _library is not None:
        _library._destroy()
    _library = _listener = None


def listen(listener: Listener | None) -> None:
    """Tell `listener` of each operation of this process from now on, and no other one."""
    global _listener
    _listener = listener


def _kernel(spec: OpSpec) -> Callable[..., Any]:
    """A kernel that tells the listener of an operation, and dispatches it further."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = getattr(torch.ops.c10d, spec.name).default._handle.redispatch_boxed

    def kernel(keys: Any, *args: Any) -> Any:
        listener = _listener
        if listener is None:
            return redispatch(keys & after, *args)
        known = listener.before(spec, args)
        try:
            result = redispatch(keys & after, *_accepted(spec, args))
        except BaseException:
            listener.raised(known)
            raise
        other = listener.after(spec, known, args, result)
        return result if other is None else other

    return kernel


def _accepted(spec: OpSpec, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the fake backend takes them.

    It fills what a rank gets with what the rank gives, and refuses if that is empty or of another shape. The values
    mean nothing, so it is given the outputs instead. `_get_backend`, and a backend that refuses: 2.11 to 2.15.
    """
    if spec.kind not in ("all_to_all", "all_to_all_single"):
        return args
    outputs, inputs, group, *others = args
    if spec.kind == "all_to_all":
        is_refused = [tensor.shape for tensor in outputs] != [tensor.shape for tensor in inputs]
    else:
        is_refused = bool(outputs.numel()) and not inputs.numel()
        others[1] = others[0]
    if not is_refused:
        return args
    device = (outputs[0] if spec.kind == "all_to_all" else outputs).device
    is_fake = _unbox_group()(group)._get_backend(device).name() == "fake"
    return (outputs, outputs, group, *others) if is_fake else args


# -- what the arguments are


@functools.cache
def _unbox_group() -> Callable[[Any], Any]:
    """`ProcessGroup.unbox`: 2.11 to 2.15."""
    unbox: Callable[[Any], Any] = torch._C._distributed_c10d.ProcessGroup.unbox
    return unbox


def group_of(spec: OpSpec, args: tuple[Any, ...]) -> Any:
    """The process group, the very object that Python knows."""
    return _unbox_group()(args[spec.group])


_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


def reduce_op_of(spec: OpSpec, args: tuple[Any, ...]) -> int | None:
    """The number of the reduce operation; None if there is none. `ScriptObject._get_method`: 2.11 to 2.15."""
    global _latest_op
    op = None if spec.op is None else int(torch._C.ScriptObject._get_method(args[spec.op], "op")())
    _latest_op = id(args), op
    return op


# The arguments of a call, by their identity, and its reduce operation, which takes long to find.
_latest_op: tuple[int, int | None] = (0, None)


def latest_reduce_op_of(spec: OpSpec, args: tuple[Any, ...]) -> int | None:
    """The same, for a call that the listener has asked for it since the call began."""
    known, op = _latest_op
    return op if known == id(args) else reduce_op_of(spec, args)


def name_of_reduce_op(number: int | None) -> str | None:
    if number is None:
        return None
    return _REDUCE_OPS[number] if number < len(_REDUCE_OPS) else f"reduce operation {number}"


# -- works


def work_of(result: Any) -> Any:
    """The work that an operation has returned, the very object that its caller gets; None if there is none.

    `Work.unbox`: 2.11 to 2.15.
    """
    last = result[-1] if isinstance(result, tuple) else result
    return torch._C._distributed_c10d.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


def with_complete_work(result: Any, outputs: list[torch.Tensor]) -> Any:
    """The result of an operation, with work that is complete and has a future with the outputs.

    That of a fake group has a future with nothing, which DDP refuses. `_create_work_from_future`: 2.11 to 2.15.
    """
    future: Any = torch.futures.Future()
    future.set_result(outputs)
    module: Any = torch._C._distributed_c10d
    boxed = module._create_work_from_future(future).boxed()
    return (*result[:-1], boxed) if isinstance(result, tuple) else boxed


# Methods by which a caller of `Work` learns that it is complete, or leaves that to others.
_WAITS = ("wait", "synchronize", "get_future", "block_current_stream", "is_completed")
# Those after which it is complete, on a CPU.
_ENDS = ("wait", "is_completed")
_on_wait: Callable[[Any], None] | None = None
_on_waited: Callable[[Any, bool], None] | None = None
_on_error: Callable[[], None] | None = None
_futures: FutureListener | None = None
_original_waits: dict[tuple[Any, str], Any] = {}  # while they are replaced
_USES_OF_FUTURES = ("add_done_callback", "done", "then", "value", "wait")
_COMPUTING = (torch, torch.Tensor, torch.futures.Future)  # whose functions tell nobody that something is complete
_waiting: dict[int, int] = {}  # by thread: how many waits it is in that have no time-out of their own


class FutureListener(Protocol):
    """Hears of the futures of works."""

    def future_taken(self, work: Any, future: Any) -> None:
        """A caller has got the future of a work."""

    def future_used(self, future: Any) -> None:
        """A caller waits for a future, or leaves that to others."""

    def future_chained(self, future: Any, result: Any) -> None:
        """A caller has got the result of a callback that only computes, and can only wait for this."""


def watch_waits(
    on_wait: Callable[[Any], None] | None,
    on_error: Callable[[], None] | None,
    futures: FutureListener | None = None,
    on_waited: Callable[[Any, bool], None] | None = None,
) -> None:
    """Call `on_wait(work)` before each wait of Python code for a work, and `on_error` when one raises.

    `on_waited(work, is_complete)` is called after each, before the waiting code goes on. Without `futures`, whoever
    asks a work for its future counts as one that waits. With None, the methods of works are as they were.
    `torch._C.Future`, `torch._C._collect_all`: 2.11 to 2.15.
    """
    global _on_wait, _on_waited, _on_error, _futures
    _on_wait, _on_waited, _on_error, _futures = on_wait, on_waited, on_error, futures
    if on_wait is None:
        for (owner, name), method in _original_waits.items():
            setattr(owner, name, method)
        _original_waits.clear()
    elif not _original_waits:
        work: Any = torch._C._distributed_c10d.Work
        for name in _WAITS:
            _replace(work, name, functools.partial(_watched, name))
        if futures is not None:
            for name in _USES_OF_FUTURES:
                _replace(torch._C.Future, name, functools.partial(_watched_use, name))
            _replace(torch._C, "_collect_all", _watched_collection)


# -- stores and optimizers

_on_store: Callable[[str, bool], None] | None = None
_original_stores: dict[str, Any] = {}  # while they are replaced


def watch_stores(on_store: Callable[[str, bool], None] | None, names: Iterable[str] = ()) -> None:
    """Call `on_store(name, is_over)` around each of these methods of a store, if code outside of torch calls it."""
    global _on_store
    _on_store = on_store
    import torch.distributed as dist

    store: Any = dist.Store  # type: ignore[attr-defined, unused-ignore]  # from C++
    if on_store is None:
        for name, method in _original_stores.items():
            setattr(store, name, method)
        _original_stores.clear()
    elif not _original_stores:
        for name in names:
            if name in vars(store):
                _original_stores[name] = vars(store)[name]
                setattr(store, name, _watched_store(name, getattr(store, name)))


def _watched_store(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_store = _on_store
        if on_store is None or is_of_torch(sys._getframe(1).f_code.co_filename):
            return method(*args, **kwargs)
        on_store(name, False)
        result = method(*args, **kwargs)
        on_store(name, True)
        return result

    return call


def watch_steps(before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Call these around each step of an optimizer. Returns what has a method `remove`."""
    from torch.optim import optimizer

    return [optimizer.register_optimizer_step_pre_hook(before), optimizer.register_optimizer_step_post_hook(after)]


def _replace(owner: Any, name: str, watched: Callable[[Any], Any]) -> None:
    if name in vars(owner):
        _original_waits[owner, name] = vars(owner)[name]  # what getattr gives would not bind self again
        setattr(owner, name, watched(getattr(owner, name)))


def _watched_use(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_chained = name == "then" and len(args) == 1 and _only_computes(args[0])
        result = method(self, *args, **kwargs) if is_chained or name == "done" else None
        if _futures is not None and is_chained:
            _futures.future_chained(self, result)
        elif _futures is not None and result is not False:
            _futures.future_used(self)
        return method(self, *args, **kwargs) if result is None else result

    return call


def _only_computes(callback: Any) -> bool:
    """Does a callback use only functions of torch? Another one may tell somebody that it has run."""
    code = getattr(callback, "__code__", None)
    names = (
        () if code is None else (*code.co_names, *("" for constant in code.co_consts if isinstance(constant, CodeType)))
    )
    return code is not None and all(
        name == "torch" or any(hasattr(computing, name) for computing in _COMPUTING) for name in names
    )


def _watched_collection(collect: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def call(futures: list[Any]) -> Any:
        if _futures is not None:
            for future in futures:
                _futures.future_used(future)
        return collect(futures)

    return call


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a work that tells who waits for it, or asks for its future."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "get_future" and _futures is not None and torch._C._current_graph_task_id() == -1:
            future = method(self)
            _futures.future_taken(self, future)
            # In a backward pass, C++ may get the future from a hook.
            return future
        if name != "is_completed" and _on_wait is not None:
            _on_wait(self)
        thread = threading.get_ident()
        is_endless = name == "wait" and not args and not kwargs
        is_complete = False
        if is_endless:
            _waiting[thread] = _waiting.get(thread, 0) + 1
        try:
            result = method(self, *args, **kwargs)
            is_complete = name in _ENDS and result is not False
        except Exception:
            if _on_error is not None:
                _on_error()
            raise
        finally:
            if is_endless:
                _waiting[thread] -= 1
            if name == "is_completed" and is_complete and _on_wait is not None:
                _on_wait(self)
            if (name != "is_completed" or is_complete) and _on_waited is not None:
                _on_waited(self, is_complete)
        return result

    return call


def is_waiting_for_work(thread: int) -> bool:
    """Does a thread wait for a work now, with no other time-out than that of the work's group?"""
    return _waiting.get(thread, 0) > 0


def is_synchronous(spec: OpSpec, args: tuple[Any, ...]) -> bool:
    """Does the caller say that it waits itself? `async_op` comes before the time-out; without it, that is not known."""
    return spec.timeout is not None and len(args) >= spec.timeout and args[spec.timeout - 1] is False


def issuer_of(kernel: Any) -> Any:
    """The frame that issues the operation, where `kernel` is that of the kernel: its caller, or below our mode.

    None in a thread of C++ alone, such as that in which autograd runs the backward of a GPU.
    """
    frame = kernel.f_back
    if frame is not None and frame.f_back is not None and frame.f_back.f_code.co_filename == __file__:
        frame = frame.f_back.f_back
        while frame and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(_AROUND_MODES)):
            frame = frame.f_back
    # Of the method that notes a send or receive.
    while frame is not None and frame.f_code.co_filename == _NOTED_IN:
        frame = frame.f_back
    return frame


def is_called_by_distributed(issuer: Any) -> bool:
    """Does a function of torch.distributed in Python issue the operation? Its caller then gets the work."""
    return issuer is not None and issuer.f_code.co_filename.endswith(_DISTRIBUTED)


def is_called_as(name: str, issuer: Any) -> bool:
    """Does a function of torch.distributed of this name issue the operation, perhaps by another one?"""
    while issuer is not None and issuer.f_code.co_filename.endswith(_AROUND_CALLS):
        if issuer.f_code.co_name == name:
            return True
        issuer = issuer.f_back
    return False


# Stages of a pipeline vote whether all know their shapes: `PipelineStage` of 2.13 to 2.15.
_VOTES = ("_warmup_forward_vote", "_warmup_backward_result")


def is_vote(issuer: Any) -> bool:
    """Does a stage of a pipeline receive how others vote?"""
    while issuer is not None and issuer.f_code.co_filename.endswith(_AROUND_CALLS):
        issuer = issuer.f_back
    return issuer is not None and issuer.f_code.co_name in _VOTES


def is_for_join(issuer: Any) -> bool:
    """Does the operation tell ranks without inputs that this one goes on?

    Nobody needs to wait for that: optimizers and DDP drop the work, or leave it to C++.
    """
    while issuer is not None and issuer.f_code.co_filename.endswith(_AROUND_CALLS):
        issuer = issuer.f_back
    file = None if issuer is None else _FOR_JOIN.get(issuer.f_code.co_name)
    return file is not None and issuer.f_code.co_filename.endswith(file)


# -- tensors


class TensorUses(TorchDispatchMode):
    """Reports for each operation of this thread, before it runs, which tensors it reads and which it writes.

    It leaves out views, which do neither, and collectives. `TorchDispatchMode`: all versions.

    torch keeps its compiler out of each mode, for which it imports the compiler. That takes seconds, so it is left
    until something else has imported it: the method is added to the class below.
    """

    def __init__(self, on_use: Callable[[str, list[torch.Tensor], list[torch.Tensor]], None] | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_use = on_use

    def on_call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.leaves(types):
            return NotImplemented
        if self._on_use and not func.namespace.startswith(("c10d", "_c10d")) and not _is_view(func):
            read: list[torch.Tensor] = []
            written: list[torch.Tensor] = []
            for at, argument in enumerate(func._schema.arguments):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
                (written if is_written else read).extend(tensors)
            self._on_use(str(func).removesuffix(".default"), read, written)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def leaves(self, types: Any) -> bool:
        """Is an operation on tensors of these classes left to them? Operations on their parts follow."""
        return False

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation has run, be it a view or a collective."""


# Imports the compiler when it is called. `torch._disable_dynamo`: 2.11 to 2.15.
def _call(mode: TensorUses, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.on_call(func, types, args, kwargs)


_uncompiled: Callable[..., Any] = torch._disable_dynamo(_call, recursive=True)  # type: ignore[attr-defined]


def _dispatch(mode: TensorUses, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    call = _uncompiled if "torch._dynamo" in sys.modules else _call
    return call(mode, func, types, args, kwargs or {})


TensorUses.__torch_dispatch__ = _dispatch  # type: ignore[assignment, method-assign]


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


# The number that changes nothing in a reduction: a rank that has nothing to add may fill its part with it.
_NEUTRAL = {"max": -math.inf, "min": math.inf}


def neutral_of(op: str | None) -> float | None:
    """The infinity that is to be expected in a reduction; None if there is none."""
    return _NEUTRAL.get(op or "")


def non_finite(tensor: torch.Tensor, neutral: float | None = None) -> tuple[int, int] | None:
    """Counts the NaN and infinities of a tensor, but for those that are `neutral`; None if it has none.

    `_AutoDispatchBelowAutograd`: 2.11 to 2.15.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # reading it would end the capture of a CUDA graph; NCCL's own check is in the graph
    with torch._C._AutoDispatchBelowAutograd():
        data = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
        if bool(torch.isfinite(data).all()):
            return None
        infinite = torch.isinf(data) if neutral is None else torch.isinf(data) & (data != neutral)
        found = int(torch.isnan(data).sum()), int(infinite.sum())
        return found if any(found) else None


def overwrite(tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor without a trace in autograd: neither a gradient nor a new version."""
    with torch.no_grad():
        tensor.data.fill_(value)


def is_without_data(group: Any) -> bool:
    """Does the group not communicate? `ProcessGroup.name`: all versions."""
    return str(group.name()) in ("fake", "threaded")


# --------------------------------------------------------------------------------------------------------------------
# The functions of torch that know how the parts of a tensor are put together; their collectives do not.

# By function, the arguments that say it: of `_redistribute` and `_functional_collectives`, 2.11 to 2.15.
_FILES = (os.path.join("tensor", "_redistribute.py"), "_functional_collectives.py")
_ARGUMENTS = {
    "redistribute_local_tensor": ("current_spec", "target_spec"),
    "all_gather_tensor": ("gather_dim",),
    "all_gather_single": ("gather_dim",),
}

FUNCTIONS_WITH_PARTS = frozenset(_ARGUMENTS)


def parts_of(frame: Any) -> tuple[str, ...]:
    """Read from the function of a frame what it says about parts: placements, or a dimension. Nothing gives ()."""
    code = frame.f_code
    if code.co_name not in _ARGUMENTS or not code.co_filename.endswith(_FILES):
        return ()
    variables = frame.f_locals
    given = [(name, variables[name]) for name in _ARGUMENTS[code.co_name] if name in variables]
    if sys.version_info < (3, 13):
        variables.clear()  # else this copy would keep tensors alive
    return tuple(str(value.placements) if name.endswith("spec") else f"{name} {value}" for name, value in given)
