"""Private names of tracer, dispatcher and compiler that the SPMD compiler needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
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
    torch's own mode runs arithmetic (`mul_`) of real tensors and numbers for real (torch 2.5 to 2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Whether `value` is a fake tensor (torch 2.0 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_like(mode: Any, tensor: torch.Tensor, name: str, dynamic_dim: int | None) -> torch.Tensor:
    """A fake tensor of `mode` like `tensor`, with a symbol as the size of `dynamic_dim` (torch 2.5 to 2.15)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dims = [DimDynamic.DYNAMIC if d == dynamic_dim else DimDynamic.STATIC for d in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    source = ConstantSource(name)
    fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=False, source=source, symbolic_context=context)
    return fake


def show_class_of_fakes(seen: Callable[[Any], Any] | None) -> None:
    """Let `seen` tell the `__class__` of a fake tensor; None restores it (torch 2.0 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor

    if seen is None:
        if "__getattribute__" in FakeTensor.__dict__:
            del FakeTensor.__getattribute__
        return
    plain = object.__getattribute__
    FakeTensor.__getattribute__ = lambda fake, name: (  # type: ignore[method-assign]
        seen(fake) if name == "__class__" else plain(fake, name)
    )


def saved_tensor_hooks() -> Any:
    """The hooks on tensors saved for backward that are active outside of the step (torch 2.5 to 2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def fakes_lacking_attributes(get: Callable[[Any, str], Any]) -> Iterator[None]:
    """Let `get` answer for attributes that a fake tensor does not have, or raise AttributeError (torch 2.0 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor

    FakeTensor.__getattr__ = lambda fake, name: get(fake, name)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del FakeTensor.__getattr__  # type: ignore[attr-defined]


def fixed_size(size: Any) -> int | None:
    """The size as a number, unless it is a symbol that may have several values (torch 2.1 to 2.15)."""
    if type(size) is int:
        return size
    number: int | None = size.node.maybe_as_int()
    return number


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """The errors that tracing raises if a program reads the value of a tensor (torch 2.5 to 2.15)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


def inside_backward() -> bool:
    """Whether the autograd engine runs on this thread (torch 2.0 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


def storage_key(tensor: torch.Tensor) -> int:
    """A unique key of a tensor's storage; works for fake tensors, which have no address (torch 2.1 to 2.15)."""
    key: int = tensor.untyped_storage()._cdata
    return key


def python_dispatcher() -> Any:
    """A context manager under which composite operations keep symbolic sizes (torch 2.0 to 2.15)."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def tracing_graph() -> torch.fx.Graph | None:
    """The graph that make_fx is recording, if any (torch 2.1 to 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


@contextlib.contextmanager
def values_unknown(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Keep the tracer from computing with the values of `tensors` that it knows (torch 2.1 to 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    holders: list[Any] = [*tensors]
    if mode is not None:
        holders += [get_proxy_slot(tensor, mode.tracer, None) for tensor in tensors]
    known = [(holder, holder.constant) for holder in holders if getattr(holder, "constant", None) is not None]
    for holder, _ in known:
        holder.constant = None
    try:
        yield
    finally:
        for holder, value in known:
            holder.constant = value


def raw_operation(overload: Any) -> Any:
    """The C++ function of an operator overload; a call is 0.3 microseconds faster (torch 1.12 to 2.15)."""
    return overload._op


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


def without_dispatch() -> Any:
    """A context manager in which operations bypass all dispatch modes (torch 2.0 to 2.15)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def kernel_choices() -> tuple[Any, ...]:
    """Settings that decide which operation torch chooses for attention and for encoder layers (torch 2.5 to 2.15)."""
    return (
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._is_torch_function_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def global_module_hooks() -> list[Any]:
    """The registries of hooks that run for every module (torch 2.0 to 2.15)."""
    from torch.nn.modules import module

    return [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]


def foreach_by_default(device: torch.device) -> bool:
    """Whether optimizers use their foreach form by default on this device (torch 2.0 to 2.15)."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return device.type in _get_foreach_kernels_supported_devices()


@contextlib.contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """Let functions compiled by `torch.compile` run as they are while make_fx traces (torch 2.1 to 2.15)."""
    from torch._dynamo import config

    with config.patch(error_on_nested_fx_trace=False):
        yield


@contextlib.contextmanager
def object_collectives_call(replacement: Callable[..., Any]) -> Iterator[None]:
    """Call `replacement` where a collective of Python objects packs or unpacks them (torch 1.8 to 2.15)."""
    from torch.distributed import distributed_c10d

    names = ("_object_to_tensor", "_tensor_to_object")
    originals = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(distributed_c10d, name, original)


@contextlib.contextmanager
def seen_as_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true, so that optimizers keep step counts as tensors (torch 2.6 to 2.15)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def inductor_compile(graph: torch.fx.GraphModule, fakes: list[Any], mode: Any) -> Callable[[list[Any]], Any]:
    """Compile a functional graph whose inputs are `fakes` of `mode` (torch 2.6 to 2.15).

    The result takes a list of inputs, and empties it.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode), tracing(TracingContext(mode)), mode:
        return compile_fx_inner(graph, fakes)


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions of composite operations that inductor expects (torch 2.0 to 2.15)."""
    import torch._inductor.lowering  # noqa: F401 - the decomposition of max_pool2d uses it without importing it
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


# The C++ functions behind public context managers, for hot paths (torch 2.11 to 2.15).
disable_torch_function = torch._C.DisableTorchFunction
set_grad_enabled = torch._C._set_grad_enabled


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs on this thread has ended (torch 1.0 to 2.15)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def roots_of_backward() -> list[Any]:
    """The tensors from which the backward started whose end calls this function (torch 2.4 to 2.15).

    The engine does not tell them; the frame of torch's own function has them.
    """
    from torch.autograd import graph

    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is graph._engine_run_backward.__code__:
            outputs = frame.f_locals["t_outputs"]
            return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        frame = frame.f_back  # type: ignore[assignment]
    return []


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
    return DTensor(local, dtensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def function_mode_class() -> type:
    """`TorchFunctionMode`, the base of modes that see every function of torch (torch 2.0 to 2.15)."""
    from torch.overrides import TorchFunctionMode

    return TorchFunctionMode


def is_innermost_function_mode(mode: Any) -> bool:
    """Whether `mode` is the function mode that was entered last (torch 2.0 to 2.15)."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode() is mode  # type: ignore[no-untyped-call]


def optimizer_has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of others run before or after each step of an optimizer (torch 2.0 to 2.15)."""
    from torch.optim import optimizer as module

    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_pre_hooks,
        module._global_optimizer_post_hooks,
    )
    return any(not hook.__module__.startswith("torch_testing_ext.") for each in hooks for hook in each.values())


def gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks on its gradient (torch 2.1 to 2.15)."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory, its views included (torch 1.0 to 2.15)."""
    return tensor._version


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in one call (torch 2.1 to 2.15)."""
    if targets:
        torch._foreach_copy_(targets, sources)
