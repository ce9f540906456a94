"""A hook on every operation of c10d: eager calls, DDP's reducer, FSDP and compiled code all end in one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch


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


# Kind, group, inputs, outputs, and what else an operation has, by its name. All of 2.11 to 2.15.
_IN_PLACE = {"group": 1, "inputs": 0, "outputs": 0}
_OUT_OF_PLACE = {"group": 2, "inputs": 1, "outputs": 0}
_REDUCED = {**_OUT_OF_PLACE, "op": 3, "timeout": 5}
KNOWN: dict[str, dict[str, Any]] = {
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
        if name in KNOWN:
            found.append(OpSpec(name, **KNOWN[name]))
        elif groups:
            found.append(OpSpec(name, name.strip("_"), groups[0]))
    return found


class OperationHook:
    """The hook on all operations of this process. Until it has listeners, they only pass through."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._library: Any = None
        # The arguments of a call, by their identity, and its reduce operation, which takes long to find.
        self._latest_op: tuple[int, int | None] = (0, None)

    @property
    def is_installed(self) -> bool:
        return self._library is not None

    def install(self) -> None:
        """Hook all operations, if they are not yet."""
        if self._library is None:
            library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            for spec in _specs():
                library.impl(spec.name, _kernel(spec), "BackendSelect", with_keyset=True)
            self._library = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None
        self.leave()

    def tell(self, listener: Listener) -> None:
        """Tell this listener, too, of all operations from now on."""
        self.install()
        self.listeners += (listener,)

    def leave(self, *listeners: Listener) -> None:
        """Tell these listeners no more; without any, none."""
        self.listeners = tuple(other for other in self.listeners if listeners and other not in listeners)

    def reduce_op_of(self, spec: OpSpec, args: tuple[Any, ...]) -> int | None:
        """The number of the reduce operation; None if there is none. `ScriptObject._get_method`: 2.11 to 2.15."""
        op = None if spec.op is None else int(torch._C.ScriptObject._get_method(args[spec.op], "op")())
        self._latest_op = id(args), op
        return op

    def latest_reduce_op_of(self, spec: OpSpec, args: tuple[Any, ...]) -> int | None:
        """The same, for a call that the listener has asked for it since the call began."""
        known, op = self._latest_op
        return op if known == id(args) else self.reduce_op_of(spec, args)


hook = OperationHook()


def _kernel(spec: OpSpec) -> Callable[..., Any]:
    """A kernel that tells the listeners of an operation, and dispatches it further."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = getattr(torch.ops.c10d, spec.name).default._handle.redispatch_boxed

    def kernel(keys: Any, *args: Any) -> Any:
        listeners = hook.listeners
        if not listeners:
            return redispatch(keys & after, *args)
        known = []
        for listener in listeners:
            known.append(listener.before(spec, args))
        try:
            result = redispatch(keys & after, *_accepted(spec, args))
        except BaseException:
            for listener, call in zip(listeners, known, strict=True):
                listener.raised(call)
            raise
        for listener, call in zip(listeners, known, strict=True):
            other = listener.after(spec, call, args, result)
            result = result if other is None else other
        return result

    return kernel


def is_kernel(code: CodeType) -> bool:
    """Whether this is the code of our kernels, which are on the stack while an operation is issued."""
    return code.co_name == "kernel" and code.co_filename == __file__


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


@functools.cache
def _unbox_group() -> Callable[[Any], Any]:
    """`ProcessGroup.unbox`: 2.11 to 2.15."""
    unbox: Callable[[Any], Any] = torch._C._distributed_c10d.ProcessGroup.unbox
    return unbox


def group_of(spec: OpSpec, args: tuple[Any, ...]) -> Any:
    """The process group, the very object that Python knows."""
    return _unbox_group()(args[spec.group])


REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


def name_of_reduce_op(number: int | None) -> str | None:
    if number is None:
        return None
    return REDUCE_OPS[number] if number < len(REDUCE_OPS) else f"reduce operation {number}"


def is_synchronous(spec: OpSpec, args: tuple[Any, ...]) -> bool:
    """Whether the caller says that it waits itself. `async_op` comes before the time-out; else that is not known."""
    return spec.timeout is not None and len(args) >= spec.timeout and args[spec.timeout - 1] is False


def is_without_data(group: Any) -> bool:
    """Whether the group does not communicate. `ProcessGroup.name`, `_device_types`, `_get_backend`: 2.11 to 2.15."""
    name = str(group.name())
    if name == "custom":
        return any(group._get_backend(device).name() == "fake" for device in group._device_types)
    return name in ("fake", "threaded")
