"""Describes this process as texts by name: what could make a rank differ from a new process.

`python process_state.py FILE OTHER` imports the modules of the process that has written OTHER, but for the kit's and
the test's own, and describes itself.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import resource
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist

Facts = Iterator[tuple[str, str]]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ADDRESSES = 1 << 32  # larger numbers are addresses
_OF_CLASSES = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)


def describe() -> dict[str, str]:
    """Everything about this process that the test compares, by name."""
    threads, descriptors = dict(_threads()), dict(_descriptors())
    facts = {**threads, **descriptors}
    for part in (_process, _environment, _signals, _interpreter, _logging, _random, _settings, _counters, _registered):
        facts.update(part())
    for name, module in tuple(sys.modules.items()):
        facts[f"module {name}"] = "imported"
        if name.partition(".")[0] == "torch" and module is not None:
            facts.update(_attributes(name, module))
    return facts


def _hash(value: Any) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:12]


# -- the process


def _process() -> Facts:
    yield "session", "its own" if os.getsid(0) == os.getpid() else "that of its parent"
    yield "process group", "its own" if os.getpgrp() == os.getpid() else "that of its parent"
    yield "working directory", os.getcwd()
    os.umask(mask := os.umask(0o77))
    yield "umask", oct(mask)
    yield "nice value", str(os.getpriority(os.PRIO_PROCESS, 0))
    yield "processors", str(sorted(os.sched_getaffinity(0)))
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            yield f"limit {name}", str(resource.getrlimit(getattr(resource, name)))
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(("SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "CoreDumping")):
                yield f"status {line.partition(':')[0]}", line.partition(":")[2].strip()


def _environment() -> Facts:
    for name, value in os.environ.items():
        yield f"variable {name}", value


def _threads() -> Facts:
    yield "threads of Python", str(sorted(one.name for one in threading.enumerate()))
    yield "threads of the system", str(len(os.listdir("/proc/self/task")))


def _descriptors() -> Facts:
    for number in range(1024):
        with contextlib.suppress(OSError):
            yield f"descriptor {number}", os.readlink(f"/proc/self/fd/{number}").partition(":")[0]


def _signals() -> Facts:
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        name = signal.Signals(number).name if number in list(signal.Signals) else str(number)
        yield f"handler {name}", _place(handler) if callable(handler) else str(handler)
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor >= 0:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    yield "wake-up descriptor of signals", "set" if descriptor >= 0 else "none"


# -- the interpreter


def _interpreter() -> Facts:
    yield "sys.meta_path", str([_place(finder) for finder in sys.meta_path])
    yield "sys.path_hooks", str([_place(hook) for hook in sys.path_hooks])
    for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook"):
        yield f"sys.{name}", _place(getattr(sys, name))
    yield "threading.excepthook", _place(threading.excepthook)
    yield "sys.getprofile()", str(sys.getprofile())
    yield "sys.gettrace()", str(sys.gettrace())
    yield "threading.getprofile()", str(threading._profile_hook)
    yield "threading.gettrace()", str(threading._trace_hook)
    for name in ("flags", "executable", "dont_write_bytecode"):
        yield f"sys.{name}", str(getattr(sys, name))
    yield "sys.path", str(sys.path[1:])  # the first is the folder of the file that runs
    for name in ("getrecursionlimit", "getswitchinterval", "getfilesystemencoding"):
        yield f"sys.{name}()", str(getattr(sys, name)())
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        yield f"sys.{name}", f"{type(stream).__name__} {getattr(stream, 'line_buffering', '')}"
    yield "garbage collection", f"{gc.isenabled()} {gc.get_threshold()} {gc.get_debug()} {gc.callbacks}"
    yield "objects exempt from garbage collection", "some" if gc.get_freeze_count() else "none"
    yield "faulthandler", "enabled" if faulthandler.is_enabled() else "disabled"
    yield "functions at exit", str(atexit._ncallbacks())
    yield "filters of warnings", str(len(warnings.filters))
    yield "warnings.showwarning", _place(warnings.showwarning)
    yield "start method of multiprocessing", str(multiprocessing.get_start_method(allow_none=True))
    yield "children of multiprocessing", str(len(multiprocessing.active_children()))
    yield "finalizers of multiprocessing", str(len(multiprocessing.util._finalizer_registry))
    yield "hash of a text", str(hash("text"))


def _logging() -> Facts:
    for name in ("", *sorted(logging.root.manager.loggerDict)):
        logger = logging.getLogger(name)
        if name.partition(".")[0].partition("-")[0] in ("", "torch", "c10d"):
            handlers = [_place(type(handler)) for handler in logger.handlers]
            kept = f"{handlers} {[_place(each) for each in logger.filters]}"
            yield f"logger {name or 'root'}", f"{logger.level} {logger.disabled} {logger.propagate} {kept}"


# -- torch


def _random() -> Facts:
    yield "random numbers of torch", f"{torch.initial_seed()} {_hash(torch.get_rng_state().numpy().tobytes())}"
    yield "random numbers of Python", _hash(random.getstate())
    yield "random numbers of NumPy", _hash(pickle.dumps(numpy.random.get_state(), protocol=4))


def _settings() -> Facts:
    for name in (
        *("get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads", "is_grad_enabled"),
        *("is_inference_mode_enabled", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled"),
        *("is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "is_warn_always_enabled"),
        *("is_anomaly_enabled", "is_anomaly_check_nan_enabled", "is_autocast_cache_enabled"),
    ):
        yield f"torch.{name}()", str(getattr(torch, name)())
    for name in sorted(dir(torch._C)):
        if name.startswith("_get_") and ("_enabled" in name or "_allow_" in name or "_benchmark" in name):
            with contextlib.suppress(Exception):
                yield f"torch._C.{name}()", str(getattr(torch._C, name)())
    for kind in ("cpu", "cuda"):
        yield f"autocast on {kind}", f"{torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    yield "torch.distributed.get_debug_level()", str(dist.get_debug_level())


def _counters() -> Facts:
    c10d: Any = dist.distributed_c10d
    for name, value in sorted(vars(c10d._world).items()):
        yield f"torch.distributed's {name}", str(value)
    recorder = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
    yield "flight recorder", f"{recorder['pg_config']} {len(recorder['entries'])}"
    work, autograd = torch.ones(2, requires_grad=True), torch._C._autograd
    yield "sequence number of autograd", str(autograd._get_sequence_nr())
    yield "first node of autograd", type(work.sum().grad_fn).__name__
    yield "profiler", str(autograd._profiler_enabled())
    yield "saved tensor hooks", str(autograd._saved_tensors_hooks_is_enabled())
    yield "vmap levels", str(torch._C._functorch.peek_interpreter_stack())
    yield "modes", f"{torch._C._len_torch_function_stack()} {torch._C._len_torch_dispatch_stack()}"
    yield "CUDA", f"{torch.cuda.is_initialized()} {torch.cuda._is_in_bad_fork()}"
    yield "caches of compiled code", str({name: len(code) for name, code in _compiled().items()})


def _compiled() -> dict[str, Any]:
    cache = sys.modules.get("torch._dynamo.convert_frame")
    return {} if cache is None else {"input codes": cache.input_codes.seen}


def _registered() -> Facts:
    """What the dispatcher knows: operators, and kernels by key."""
    yield "operators", _hash(sorted(torch._C._dispatch_get_all_op_names()))
    for key in ("", "CPU", "Meta", "BackendSelect", "Python", "Autograd", "AutogradCPU", "CompositeImplicitAutograd"):
        found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        yield f"kernels for {key or 'every key'}", _hash(sorted(found))
    yield "libraries of operators", str(sorted(torch.ops.loaded_libraries))


def _attributes(name: str, module: types.ModuleType) -> Facts:
    for attribute, value in tuple(vars(module).items()):
        if attribute.startswith("__") and attribute.endswith("__"):
            continue
        yield f"{name}.{attribute}", _identity(value)
        if issubclass(type(value), type) and value.__module__ == name:
            for member, inner in tuple(vars(value).items()):
                if type(inner) in _OF_CLASSES:
                    yield f"{name}.{attribute}.{member}", _identity(inner)


def _identity(value: Any) -> str:
    kind = type(value)
    if kind is int and value > _ADDRESSES:
        return "int"
    if kind in _PLAIN:
        return f"{kind.__name__} {value!r}"
    if kind in (staticmethod, classmethod):
        return f"{kind.__name__} {_place(value.__func__)}"
    if kind is property:
        return f"property {_place(value.fget)} {_place(value.fset)}"
    if kind is types.ModuleType:
        return f"module {value.__name__}"
    if kind in (list, dict, set, tuple):
        return kind.__name__
    return _place(value)


def _place(value: Any) -> str:
    """What a function or class is: its name, and where its code is, also behind wrappers."""
    kind = type(value)  # isinstance() asks objects that load a module for their class
    if kind is functools.partial:
        return f"partial of {_place(value.func)}"
    if kind is types.MethodType:
        return f"method {_place(value.__func__)}"
    if kind is types.FunctionType:
        code = value.__code__
        return f"{value.__module__}.{value.__qualname__} {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    if kind is types.BuiltinFunctionType or issubclass(kind, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def write(path: str) -> None:
    """Write what this process is to a file."""
    found = describe()
    with open(path, "w") as file:
        json.dump(found, file)


def main() -> None:
    path, other = sys.argv[1:]
    with open(other) as file:
        names = [name.removeprefix("module ") for name in json.load(file) if name.startswith("module ")]
    for name in names:
        if name.partition(".")[0] not in ("torch_testing_ext", "kit", "__main__") and not name.startswith("test_"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    write(path)


if __name__ == "__main__":
    main()
