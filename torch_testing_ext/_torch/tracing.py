"""Private names of tracer, dispatcher and compiler that the SPMD compiler needs."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx


def import_tracer() -> None:
    """Import the modules that tracing imports lazily, once, before ranks are forked (torch 2.5 to 2.15)."""
    import torch._dynamo.source
    import torch._inductor.sizevars
    import torch._subclasses.fake_tensor
    import torch.export._trace
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def traces_for_script() -> bool:
    """Whether `torch.jit.trace` traces now: torch 2.0 to 2.15."""
    return torch._C._get_tracing_state() is not None


def dispatch_mode_class() -> type:
    """`TorchDispatchMode`, the base of modes that see every operation (torch 2.0 to 2.15)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def tree() -> Any:
    """The pytree module: `tree_flatten`, `tree_unflatten`, `SUPPORTED_NODES` (torch 1.8 to 2.15)."""
    from torch.utils import _pytree

    return _pytree


def new_fake_mode() -> Any:
    """A fake mode for tracing, with symbols for `.item()` and data-dependent sizes, and otherwise static shapes.

    It admits real tensors that a step captured; the tracer checks them itself. It never computes with their values:
    torch's own mode runs arithmetic (`mul_`) of real tensors and numbers for real. It refuses collectives in place:
    nothing would wait for them (torch 2.5 to 2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                raise NotImplementedError(f"{func} works in place; use torch.distributed._functional_collectives")
            if func not in self.lift_fns:
                args, kwargs = tree().tree_map(self._to_fake, (args, kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs or {})

        def _to_fake(self, value: Any) -> Any:
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return value
            # Both are kept alive, so that all uses of a tensor, and of its views, share the memory of one fake.
            fakes = self.__dict__.setdefault("fakes_of_captured", {})
            if id(value) not in fakes:
                fakes[id(value)] = value, self.fake_tensor_converter.from_real_tensor(self, value)
            return fakes[id(value)][1]

    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return Mode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)


def fake_of_captured(mode: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """The fake under which operations of a trace used a real tensor, if any did (torch 2.5 to 2.15)."""
    found: torch.Tensor | None = mode.__dict__.get("fakes_of_captured", {}).get(id(tensor), (None, None))[1]
    return found


def is_fake(value: object) -> bool:
    """Whether `value` is a fake tensor: torch 2.0 to 2.15."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """A unique key of a tensor's storage, also of fake tensors and of those of torch.func (torch 2.1 to 2.15)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    key: int = tensor.untyped_storage()._cdata
    return key


def holders_of_memory(tensor: torch.Tensor) -> int:
    """The number of tensors, arrays and graphs that hold the memory of a tensor (torch 2.11 to 2.15)."""
    storage = tensor.untyped_storage()
    # That object is one of them.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


class MemoryReference:
    """A weak reference to the memory of a plain tensor, which other tensors may keep alive (torch 2.0 to 2.15)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def is_alive(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]

    def tensor(self, like: torch.Tensor) -> torch.Tensor | None:
        """The tensor again, if something keeps its memory alive and it has the kind of `like`."""
        if self._place[1:] != (like.shape, like.stride()) or self._dtype != like.dtype:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, *self._place)


def python_dispatcher() -> Any:
    """A context manager under which composite operations keep symbolic sizes (torch 2.0 to 2.15)."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


# The generated Python bindings parse plain arguments faster than the dispatcher's generic call. These take exactly the
# schema's arguments in the schema's order.
_FUNCTIONS = "t mm bmm addmm relu sigmoid tanh sqrt cat"
_OF_TENSORS = "add sub mul div"
_OVERLOADS = {
    "default": {name: getattr(torch, name) for name in _FUNCTIONS.split()}
    | {name: getattr(torch.Tensor, name) for name in ("addcmul_", "addcdiv_", "view", "expand")},
    "Tensor": {name: getattr(torch, name) for name in _OF_TENSORS.split()}
    | {name: getattr(torch.Tensor, name) for name in ("add_", "mul_")},
    "Scalar": {"lerp_": torch.Tensor.lerp_},
    "out": {name: getattr(torch, name) for name in ("mm", "bmm", "mul", "add")},
}


def fastest_operation(namespace: str, name: str, overload: str) -> Any:
    """The function that calls an operation with the least overhead (torch 1.12 to 2.15)."""
    fast = _OVERLOADS.get(overload, {}).get(name) if namespace == "aten" else None
    return fast or getattr(getattr(getattr(torch.ops, namespace), name), overload)._op  # the C++ function


def below_autograd() -> Any:
    """A guard: while it is alive, operations skip autograd's kernels (torch 2.1 to 2.15)."""
    return torch._C._AutoDispatchBelowAutograd()


def local_tensor(dtensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, without the autograd node and the overhead of `to_local` (torch 2.0 to 2.15)."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of `dtensor` with one of the same shape, dtype and device (torch 2.0 to 2.15)."""
    dtensor._local_tensor = local


def calling_modes(device: str) -> tuple[Any, ...]:
    """The modes of torch in which a function is called, and that decide which operations run (torch 2.5 to 2.15)."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._is_torch_function_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def foreach_by_default(device: torch.device) -> bool:
    """Whether optimizers use their foreach form by default on this device: torch 2.0 to 2.15."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return device.type in _get_foreach_kernels_supported_devices()


# The C++ functions behind public context managers, for hot paths (torch 2.11 to 2.15).
disable_torch_function = torch._C.DisableTorchFunction
below_subclass_functions = torch._C.DisableTorchFunctionSubclass
set_grad_enabled = torch._C._set_grad_enabled


# torch.compile traces what autograd calls in a compiled function; this keeps a function out (torch 2.1 to 2.15).
outside_dynamo: Callable[[Any], Any] = torch._compile._disable_dynamo


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs on this thread has ended (torch 1.0 to 2.15)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def roots_of_backward() -> list[Any]:
    """The tensors from which the backward started whose end calls this function (torch 2.4 to 2.15).

    The engine does not tell them; the frame of torch's own function has them. Where a GPU has finished the backward,
    its thread of the engine calls this, and that frame waits in another thread.
    """
    own = _roots_in(sys._getframe(1))
    return own or [root for frame in sys._current_frames().values() for root in _roots_in(frame)]


def _roots_in(frame: Any) -> list[Any]:
    frame = _frame_of_backward(frame)
    outputs = () if frame is None else frame.f_locals["t_outputs"]
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _frame_of_backward(frame: Any) -> Any:
    from torch.autograd import graph

    while frame is not None and frame.f_code is not graph._engine_run_backward.__code__:
        frame = frame.f_back
    return frame


def backward_accumulates() -> bool:
    """Whether the backward that runs now leaves gradients, as `backward()` does and `torch.autograd.grad` does not.

    torch 2.4 to 2.15.
    """
    frames = [sys._getframe(1), *sys._current_frames().values()]
    calls = [frame for frame in map(_frame_of_backward, frames) if frame is not None]
    return not calls or bool(calls[0].f_locals["kwargs"].get("accumulate_grad"))


def gather_into(into: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Start to gather tensors of one size into a flat one, under the name that does not warn (torch 2.11 to 2.15)."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, mine, group=group, async_op=True)


def dtensor_like(dtensor: Any, local: torch.Tensor) -> Any:
    """A DTensor with the shape and placements of another one, without the cost of `from_local` (torch 2.5 to 2.15)."""
    from torch.distributed.tensor import DTensor

    if local.dtype != dtensor.dtype:
        mesh, placements = dtensor.device_mesh, dtensor.placements
        shape, stride = dtensor.shape, dtensor.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return DTensor(local, dtensor._spec, requires_grad=False)  # type: ignore[no-untyped-call, unused-ignore]


def put_function_mode(mode: Any, enter: bool) -> None:
    """Enter a function mode below those of others, each of which its `with` pops, or remove it (torch 2.3 to 2.15)."""
    from torch._C import _len_torch_function_stack
    from torch.overrides import _pop_mode, _push_mode

    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
    others = [other for other in reversed(modes) if other is not mode]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    first = int(bool(others) and others[0] is default)  # `set_default_device` wants its own at the bottom
    for each in [*others[:first], *[mode] * enter, *others[first:]]:
        _push_mode(each)  # type: ignore[no-untyped-call]


def meets_all(func: Any, args: Sequence[Any]) -> bool:
    """Whether a function that a mode sees is a collective of the default group: torch 2.5 to 2.15."""
    import torch.distributed as dist

    module = str(getattr(func, "__module__", ""))
    if module == "torch.distributed.distributed_c10d":
        groups = [arg for arg in args if isinstance(arg, dist.ProcessGroup)]
        return func.__name__ not in ("isend", "irecv", "send", "recv") and {*groups} <= {dist.group.WORLD}
    names = [arg for arg in args if isinstance(arg, str)]
    return module.startswith("torch._ops._c10d_functional") and getattr(dist.group.WORLD, "group_name", None) in names


def optimizer_has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of others run before or after each step of an optimizer: torch 2.0 to 2.15."""
    from torch.optim import optimizer as module

    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_pre_hooks,
        module._global_optimizer_post_hooks,
    )
    return any(not hook.__module__.startswith("torch_testing_ext.") for registry in hooks for hook in registry.values())


def gradient_hooks(tensor: torch.Tensor) -> int:
    """The number of hooks of others on a tensor's gradient (torch 2.1 to 2.15)."""
    registries: Any = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    hooks = [hook for registry in registries if registry for hook in registry.values()]
    return sum(not str(getattr(hook, "__module__", "")).startswith("torch_testing_ext.") for hook in hooks)


def run_hook_last(tensor: torch.Tensor, handle: Any) -> bool:
    """Let a post-accumulate hook run after those registered since. Returns whether it did already (torch 2.1 to 2.15).

    torch reads the values of the dict itself, whose order `move_to_end` does not change.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    if next(reversed(hooks)) == handle.id:
        return True
    hooks[handle.id] = hooks.pop(handle.id)
    return False


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory, its views included (torch 1.0 to 2.15)."""
    return tensor._version


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in one call (torch 2.1 to 2.15)."""
    if targets:
        torch._foreach_copy_(targets, sources)
