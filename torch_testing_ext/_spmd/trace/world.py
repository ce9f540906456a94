"""The world outside of the program that runs a step: clocks, files, the system's randomness, processes.

Nothing tells a later call that such a thing has changed, and a traced program would keep its first value. Therefore
code of the step that asks for it is refused. Environment variables and torch's settings are guarded instead.
"""

from __future__ import annotations

import datetime
import functools
import gc
import io
import os
import random
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch

from .codes import kind_of_code, standard_module

_CLOCK = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_TIMES = [name for clock in _CLOCK for name in (clock, f"{clock}_ns")]
_TIMES += ["localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime", "clock_gettime_ns", "times"]
_FILES = ("open", "stat", "lstat", "listdir", "scandir", "access", "getcwd", "readlink", "read", "pread", "statvfs")
_SYSTEM = ("urandom", "getrandom", "getloadavg", "cpu_count", "sched_getaffinity", "getppid")
_DATES = {"now", "utcnow", "today"}
_READS_OF_FILES = {"read", "read1", "readline", "readlines", "readinto", "readall", "peek", "seek", "tell"}
_RANDOM_STATE = {"initial_seed", "get_state", "graphsafe_get_state", "get_offset"}


def _functions(module: Any, names: Any, what: str) -> dict[Any, str]:
    found = {name: getattr(module, name, None) for name in names}
    return {function: f"{what} ({module.__name__}.{name})" for name, function in found.items() if function is not None}


_WORLD: dict[Any, str] = {
    **_functions(time, _TIMES, "the clock"),
    **_functions(os, _FILES, "the file system"),
    **_functions(os, _SYSTEM, "the operating system"),
    **_functions(gc, ("get_count", "get_stats", "get_objects"), "the state of the interpreter"),
    **_functions(sys, ("getrefcount",), "the state of the interpreter"),
    **_functions(tracemalloc, ("get_traced_memory",), "the state of the interpreter"),
    **_functions(resource, ("getrusage", "getrlimit"), "the operating system"),
    torch.is_autocast_cache_enabled: "autocast's cache (torch.is_autocast_cache_enabled), which a trace turns off",
    io.open: "a file (open)",
    io.open_code: "a file (open_code)",
    input: "the standard input",
}
# Functions in Python that ask in ways which no event shows.
_WORLD_CODES: dict[CodeType, str] = {
    subprocess.Popen.__init__.__code__: "another process (subprocess)",
    threading.Thread.start.__code__: "what another thread does",
}
# Parts of Python's library whose reads do not reach the step's values.
_HARMLESS = {"logging", "warnings", "traceback", "linecache", "inspect", "importlib", "tokenize", "threading", "typing"}
# Modules whose types do not change, are compared in other ways, or hold nothing that a step computes with.
_LASTING = {
    *("builtins", "torch", "numpy", "re", "datetime", "decimal", "fractions", "functools", "types", "operator"),
    *("_thread", "threading", "enum", "collections", "random", "_random", "typing", "contextvars"),
    *("weakref", "_multiprocessing"),
}
_RANDOM_FILES = {f"{torch.__path__[0]}/random.py", f"{torch.__path__[0]}/cuda/random.py"}
_ENVIRONMENT = {
    getattr(os._Environ, name).__code__ for name in ("__getitem__", "__iter__", "__len__", "copy", "__repr__")
}
_ASKING = {random.Random.seed.__code__, *_WORLD_CODES, *_ENVIRONMENT}
_SETTINGS = ("get_", "is_", "are_", "_get_")
_SETTINGS_OF_PYTHON: dict[Any, Callable[[], Any]] = {
    sys.getrecursionlimit: sys.getrecursionlimit,
    sys.getswitchinterval: sys.getswitchinterval,
}
_ERRORS_OF_NUMPY = {"_get_extobj_dict", "geterrobj"}  # of numpy 2, and 1: how it treats errors
_ASKING_FOR_OTHERS = re.compile(
    rf"{re.escape(torch.__path__[0])}/backends/|.*[\\/]numpy[\\/]_?core[\\/]_ufunc_config\.py"
)


def outside_read(function: Any) -> str | None:
    """Names the part of the outside world that a function in C is about to read, if any."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        dated = issubclass(owner, datetime.date) and function.__name__ in _DATES
        return f"the clock ({owner.__name__}.{function.__name__})" if dated else None
    if isinstance(owner, io.IOBase) and not isinstance(owner, (io.StringIO, io.BytesIO)):
        return "a file" if function.__name__ in _READS_OF_FILES else None
    if isinstance(owner, torch.Generator):
        return "the state of a random generator" if function.__name__ in _RANDOM_STATE else None
    return _WORLD.get(function)


def never_asks(code: CodeType) -> bool:
    """Whether no call of `code`, which is the system's, reads anything from outside of the program by itself."""
    may_be_setting = not code.co_argcount and code.co_name.startswith((*_SETTINGS, *_ERRORS_OF_NUMPY))
    return code not in _ASKING and not may_be_setting


def holds_no_world(kind: type) -> bool:
    """Whether no method in C of an object of this type reads anything from outside of the program."""
    outside = (type, io.IOBase, torch.Generator, types.ModuleType, type(None))
    return not issubclass(kind, outside) and kind.__module__.split(".")[0] in _LASTING


def hidden_read(function: Any, opaque: dict[int, str]) -> str | None:
    """The object from outside of the step that a method in C belongs to, if nothing tells what it holds.

    opaque: the paths of such objects, by id.
    """
    owner = getattr(function, "__self__", None)
    path = opaque.get(id(owner))
    if path is None or type(owner).__module__.split(".")[0] in _LASTING:
        return None
    return f"{path}, a {type(owner).__name__} into which the compiler cannot see"


def outside_read_in_python(frame: FrameType) -> str | None:
    """Names the part of the outside world that a function in Python, just called, reads, if any."""
    if frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        return "the operating system's randomness (an unseeded random.Random)"
    return _WORLD_CODES.get(frame.f_code)


def reads_environment(code: CodeType) -> bool:
    """Whether `code` reads environment variables."""
    return code in _ENVIRONMENT


def is_asked_by_step(frame: FrameType | None) -> bool:
    """Whether code of the step or of an installed package asks, itself or through Python's library; not an import."""
    asked = False
    while frame is not None:
        file = frame.f_code.co_filename
        module = standard_module(file)
        if module == "importlib" or (not asked and module in _HARMLESS):
            return False
        if not asked and module is None and file not in _RANDOM_FILES:
            if kind_of_code(frame.f_code, frame.f_globals) == "system":
                return False
            asked = True
        frame = frame.f_back
    return asked


def asker_of_setting(frame: FrameType | None) -> FrameType | None:
    """The code that asks for a setting: the caller of `torch.backends`, whose attributes call functions, or numpy."""
    while frame is not None and _asks_for_others(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def _asks_for_others(filename: str) -> bool:
    return _ASKING_FOR_OTHERS.match(filename) is not None


def may_be_setting(function: Any, module: str | None) -> bool:
    """Whether `function`, of this module, may be one for which `setting_of` has an answer, as its name tells."""
    if isinstance(function, types.BuiltinFunctionType) and function in _SETTINGS_OF_PYTHON:
        return True
    name, of_torch = getattr(function, "__name__", ""), module is not None and module.startswith("torch")
    return name in _ERRORS_OF_NUMPY or (of_torch and name.startswith(_SETTINGS))


def setting_of(function: Any, module: str | None) -> Callable[[], Any] | None:
    """`function`, or what calls it, if it returns a setting of torch, numpy or Python, without arguments."""
    if not may_be_setting(function, module):
        return None
    if isinstance(function, types.BuiltinFunctionType) and function in _SETTINGS_OF_PYTHON:
        return _SETTINGS_OF_PYTHON[function]
    if function.__name__ in _ERRORS_OF_NUMPY:
        return cast("Callable[[], Any]", function)
    try:
        value = function()
    except Exception:
        return None
    return function if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type(None))) else None
