"""What inductor finds out about the machine and its C++ compiler, once for all processes forked from this one.

Every process that compiles for the CPU first tries which vector instructions the compiler and the machine have. It
loads a small library for each set of instructions in an interpreter of its own, even if the library was built before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .fake_tensors import untouched_cache

# What a compiler, and the loader of a library, may read of the environment.
_READ_BY_COMPILERS = (
    *("PATH", "CXX", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "TMPDIR"),
)


def prepare_for_cpp() -> None:
    """Find out what this machine's vector instructions are, and which headers the C++ compiler would include.

    Only answers that hold whatever the settings of inductor are kept: that a library with these instructions, built by
    this compiler in this folder, could be loaded. Everything that follows from settings is worked out again.
    `torch._inductor.cpu_vec_isa.VecISA.check_build`, `codecache.CppPythonBindingsCodeCache`: 2.11 to 2.15.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    _keep_checks()
    with _without_choices(), suppress(Exception):  # a rank that compiles finds the same fault, and reports it
        known = dict(CppPythonBindingsCodeCache.cache)
        try:
            # Looks for the instructions, and reads all headers to name the precompiled one. It does not compile this.
            CppPythonBindingsCodeCache.load_pybinding_async(["float*"], 'extern "C" void kernel(float*) {}\n')
        finally:
            CppPythonBindingsCodeCache.cache.clear()
            CppPythonBindingsCodeCache.cache.update(known)


def _keep_checks() -> None:
    """Have a check that has succeeded not made again under the same circumstances, here and in forked processes."""
    from torch._inductor.cpu_vec_isa import VecISA

    check = VecISA.check_build
    if hasattr(check, "__wrapped__"):
        return
    succeeded = set[Any]()

    @functools.wraps(check)
    def check_once(isa: Any, code: str) -> bool:
        circumstances = _circumstances(isa, code)
        if circumstances in succeeded:
            return True
        if result := check(isa, code):
            succeeded.add(circumstances)
        return result

    setattr(VecISA, "check_build", check_once)  # noqa: B010 - mypy knows that it is a method


def _circumstances(isa: Any, code: str) -> tuple[Any, ...]:
    """All that decides whether a check succeeds; the fingerprint names the compiler, its version and torch's."""
    import subprocess

    from torch._inductor import cpu_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    fingerprint = cpu_vec_isa._get_isa_dry_compile_fingerprint(isa.build_arch_flags())
    # A test may replace these functions, to see what happens where a check fails.
    functions = subprocess.run, subprocess.check_call, subprocess.Popen
    return code, str(isa), fingerprint, cache_dir(), functions, *map(os.environ.get, _READ_BY_COMPILERS)


@contextmanager
def _without_choices() -> Iterator[None]:
    """Leave no trace of which instructions are chosen in this context: that also follows from settings of inductor."""
    from torch._inductor import cpu_vec_isa

    instances = {isa: dict(vars(isa)) for isa in cpu_vec_isa.supported_vec_isa_list}
    try:
        yield
    finally:
        for isa, attributes in instances.items():
            vars(isa).clear()
            vars(isa).update(attributes)
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for function in _cached_methods(cpu_vec_isa.VecISA):
            function()


def _cached_methods(cls: type[Any]) -> Iterator[Callable[[], None]]:
    """What clears the cache of each cached method of a class and its subclasses."""
    for value in vars(cls).values():
        if (clear := getattr(value, "cache_clear", None)) is not None:
            yield clear
    for derived in cls.__subclasses__():
        yield from _cached_methods(derived)


def register_patterns_for_cpu() -> None:
    """Have inductor register the patterns that it looks for in joint graphs of CPU tensors, which takes 0.7 s of CPU.

    They follow from torch's version alone. Counters and the cache of fake tensors are as before.
    `torch._inductor.fx_passes.joint_graph.lazy_init`: 2.11 to 2.15.
    """
    import torch
    from torch._inductor.fx_passes import joint_graph

    with untouched_cache():
        joint_graph.lazy_init(torch.device("cpu"))
