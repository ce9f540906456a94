"""The shapes, strides and types of the results of operators, which DTensor works out in every process.

DTensor runs each operator on fake tensors before it asks its rules how the result is placed. This takes half of a
rank's time in a short test, and is the same in every rank: it depends on the operator and its arguments, not on a mesh,
on placements or on rules. So a process that forks ranks works it out once: it *learns* a call of an operator, which it
is told as text. Rules are never remembered: each rank runs them.

An answer counts only in a rank where everything is as it was in the process that has learnt it: the code of torch that
works shapes out, what is registered with the dispatcher, and the settings that operators read. Otherwise, and under
any mode that could see the fake tensors, DTensor works it out as usual.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .fake_tensors import fake_tensor_mode, untouched_cache
from .namespaces import Namespaces

PREFIX = "result of "
LONGEST = 2_000  # characters of a call
MOST = 5_000  # calls that a process learns, or asks for

# The code that works out shapes; `torch` and `torch._C` have the functions that this code calls.
_MODULES = ("torch", "torch._C")
_PACKAGES = (
    "torch._decomp",
    "torch._guards",
    "torch._library",
    "torch._meta_registrations",
    "torch._ops",
    "torch._prims",
    "torch._prims_common",
    "torch._refs",
    "torch._subclasses",
    "torch._tensor",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor._op_schema",
    "torch.distributed.tensor._sharding_prop",
    "torch.distributed.tensor.debug._comm_mode",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.library",
    "torch.utils._mode_utils",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
)
# What changes by itself: counters of FakeTensorMode, and whether modes are in force, which `_is_watched` looks at.
_IGNORED = (
    "cache_hits",
    "cache_misses",
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_PROPAGATION = "torch.distributed.tensor._sharding_prop"
_METHOD = "_propagate_tensor_meta_non_cached"  # of ShardingPropagator: torch 2.11 to 2.15
_UNKNOWN = object()

# The answers, by call, each with the operator's kernels that are written in Python.
_known: dict[str, tuple[Any, Any, dict[Any, Any]]] = {}
_asked: dict[str, None] = {}  # the calls that this rank has worked out by itself
_notes = False  # whether this rank notes them
_is_rank = False
_original: Callable[[Any, Any], Any] | None = None
_code: Namespaces | None = None
_settings: tuple[object, ...] = ()
_registrations = 0  # how often something was registered with the dispatcher, since the first call was learnt
_registrations_then = 0


class _Unsupported(Exception):
    """The call has an argument that has no text."""


# -- in a rank


def use_known_results(note: bool) -> None:
    """In a new rank: use what was learnt, and if `note`, note what was not."""
    global _is_rank, _notes
    _is_rank, _notes = True, note
    _install()


def unknown_results() -> tuple[str, ...]:
    """The calls that this rank had to work out, for `learn`."""
    return tuple(_asked)


def _install() -> bool:
    """Have DTensor ask here first. False if DTensor is not imported, or somebody else has replaced this."""
    global _original
    cls = getattr(sys.modules.get(_PROPAGATION), "ShardingPropagator", None)
    method = vars(cls).get(_METHOD) if cls is not None else None
    if _original is not None:
        return method is not None and getattr(method, "__wrapped__", None) is _original
    if method is None or not _is_of(method, _PROPAGATION):
        return False
    _original = original = method

    @functools.wraps(original)
    def propagate(propagator: Any, schema: Any) -> Any:
        if not _is_rank or not (_known or _notes):
            return original(propagator, schema)
        call = _call_of(schema)
        if call is not None and (answer := _answer(call)) is not _UNKNOWN:
            return answer
        result = original(propagator, schema)
        if call is not None and _notes and len(_asked) < MOST:
            _asked[call] = None
        return result

    setattr(cls, _METHOD, propagate)
    return True


def _is_of(function: Any, module: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[module].__file__


def _answer(call: str) -> Any:
    if call not in _known:
        return _UNKNOWN
    answer, op, kernels = _known[call]
    if _state_has_changed() or op.py_kernels != kernels:
        _known.clear()  # for good: this process is a rank
        return _UNKNOWN
    return list(answer) if type(answer) is list else answer


def _state_has_changed() -> bool:
    assert _code is not None
    return _registrations != _registrations_then or _settings != _current_settings() or _code.have_changed()


def _current_settings() -> tuple[object, ...]:
    """What operators read besides their arguments."""
    c = torch._C
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        c._get_mkldnn_enabled(),
        c._get_nnpack_enabled(),
        c._get_cudnn_enabled(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        len(torch.ops.loaded_libraries),
    )


def _is_watched() -> bool:
    """Could anything but DTensor see the fake tensors, or change what becomes of them?

    A CommDebugMode disregards fake tensors.
    """
    c = torch._C
    if c._len_torch_function_stack() or torch.is_inference_mode_enabled():
        return True
    if torch._guards.TracingContext.try_get() is not None or c._functorch.peek_interpreter_stack() is not None:
        return True
    comm_debug = getattr(sys.modules.get("torch.distributed.tensor.debug._comm_mode"), "CommDebugMode", None)
    for index in range(c._len_torch_dispatch_stack()):
        if type(c._get_dispatch_stack_at(index)) is not comm_debug:
            return True
    return False


# -- calls as texts


def _call_of(schema: Any) -> str | None:
    """The text of a call; None if what comes of it could depend on more than the text says."""
    op = schema.op
    if type(op) is not torch._ops.OpOverload or op.namespace not in ("aten", "prims") or _is_watched():
        return None
    try:
        args = [_encode(arg) for arg in schema.args_schema]
        kwargs = {name: _encode(arg) for name, arg in schema.kwargs_schema.items()}
    except _Unsupported:
        return None
    # Which keys of the dispatcher are in force here: autocast is one, for example.
    included = torch._C._dispatch_tls_local_include_set().raw_repr()
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    text = f"{PREFIX}{(str(op), args, kwargs, included, excluded)!r}"
    return text if len(text) <= LONGEST else None


def _encode(arg: Any) -> Any:
    """A literal for an argument. Literals of different types have different texts: 1, 1.0, True."""
    kind = type(arg)
    if arg is None or kind is bool or kind is int or kind is str:
        return arg
    if kind is float:
        if math.isfinite(arg):
            return arg
    elif kind is list:
        return [_encode(one) for one in arg]
    elif kind is tuple:
        return ("tuple", *(_encode(one) for one in arg))
    elif kind is torch.Size:
        return ("size", *_integers(arg))
    elif kind in (torch.dtype, torch.layout, torch.memory_format):
        return ("torch", str(arg).removeprefix("torch."))
    elif kind is torch.device:
        if arg == torch.device("cpu"):
            return ("device",)
    elif kind is sys.modules["torch.distributed.tensor._dtensor_spec"].DTensorSpec:
        meta = arg.tensor_meta
        # Fake tensors of other devices initialise the device.
        if meta is not None and arg.mesh.device_type == "cpu":
            return ("tensor", _integers(meta.shape), _integers(meta.stride), _encode(meta.dtype))
    raise _Unsupported


def _integers(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if any(type(one) is not int for one in found):  # symbols
        raise _Unsupported
    return found


def _decode(literal: Any) -> Any:
    if isinstance(literal, list):
        return [_decode(one) for one in literal]
    if not isinstance(literal, tuple):
        return literal
    kind, *rest = literal
    match kind:
        case "tuple":
            return tuple(_decode(one) for one in rest)
        case "size":
            return torch.Size(rest)
        case "torch":
            return getattr(torch, rest[0])
        case "device":
            return torch.device("cpu")
        case "tensor":
            shape, stride, dtype = rest
            return torch.empty_strided(shape, stride, dtype=_decode(dtype), device="cpu")
    raise ValueError(literal)


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


# -- in a process that forks ranks


def preload(hint: str) -> None:
    """Do in this process what the processes that it forks need not do then: import a module, or learn a call."""
    if hint.startswith(PREFIX):
        learn(hint)
    else:
        importlib.import_module(hint)


def learn(call: str) -> None:
    """Work out what comes of a call, for the ranks that this process forks from now on.

    Leaves no trace in torch's own caches: ranks find these as in a new process.
    """
    if call in _known or len(_known) >= MOST or not _install():
        return
    _prepare_to_learn()
    name, args, kwargs, included, excluded = ast.literal_eval(call.removeprefix(PREFIX))
    op, keys = _operator(name), torch._C.DispatchKeySet.from_raw_repr
    schema = SimpleNamespace(
        op=op,
        gen_fake_args=lambda: tuple(_decode(arg) for arg in args),
        gen_fake_kwargs=lambda: {key: _decode(arg) for key, arg in kwargs.items()},
    )
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or a rank would not get a warning that comes once
    try:
        with warnings.catch_warnings(record=True) as warned, untouched_cache():
            warnings.simplefilter("always")
            with torch._C._ForceDispatchKeyGuard(keys(included), keys(excluded)):
                answer = _work_out(schema)
    finally:
        torch.set_warn_always(always)
    if not warned:
        _known[call] = answer, op, dict(op.py_kernels)


def _work_out(schema: Any) -> Any:
    assert _original is not None and _code is not None
    propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    try:
        return _original(propagator, schema)
    finally:
        _code.ignore_changes()


def _prepare_to_learn() -> None:
    """Forget everything if this process has changed since: it has imported something that matters."""
    global _code, _settings, _registrations_then
    if _code is None:
        _count_registrations()
        mode = fake_tensor_mode()
        _code = Namespaces(_MODULES, _PACKAGES, _IGNORED, [mode.cache, mode.cache_bypasses])
    elif _state_has_changed():
        _known.clear()
        _code.remember()
    _settings, _registrations_then = _current_settings(), _registrations


def _count_registrations() -> None:
    """Count what is registered with the dispatcher from Python from now on. `_DispatchModule`: torch 2.11 to 2.15."""
    library: Any = torch._C._DispatchModule
    for name, method in tuple(vars(library).items()):
        if callable(method) and not name.startswith("_"):
            setattr(library, name, _counting(method))
    operators: Any = torch._ops.OperatorBase
    operators.py_impl = _counting(operators.py_impl)


@contextmanager
def harmless_registrations() -> Iterator[None]:
    """What is registered meanwhile changes no shape."""
    global _registrations
    before = _registrations
    try:
        yield
    finally:
        _registrations = before


def _counting(method: Any) -> Any:
    @functools.wraps(method)
    def counting(*args: Any, **kwargs: Any) -> Any:
        global _registrations
        _registrations += 1
        return method(*args, **kwargs)

    return counting
