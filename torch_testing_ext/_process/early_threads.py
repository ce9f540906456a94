"""Threads that run before anything of ours."""

from __future__ import annotations

import sys
import threading

_threads_at_start = tuple(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def explain_early_threads() -> str:
    """Say who has started threads before this package was imported, and what to do; "" if there are none."""
    if not _threads_at_start:
        return ""
    modules = (sys.modules.get(name) for name in ("sitecustomize", "usercustomize"))
    files = [file for module in modules if module is not None and (file := getattr(module, "__file__", ""))]
    by = ", ".join([*files, "a .pth file"])
    return (
        f"Before torch_testing_ext was imported, threads were there already: {', '.join(_threads_at_start)}. {by} or a "
        f"plugin starts them. Run the tests without that, for example with another PYTHONPATH, or each rank in a new "
        f"interpreter: torchrun --nproc-per-node=N -m pytest FILE"
    )
