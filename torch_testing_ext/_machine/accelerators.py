"""How many accelerators are there, and of what kind: asked without touching them from this process.

Asking CUDA or ROCm for its devices makes the asking process unfit to be forked into ranks that use them. So the
question is put by a forked child, or by a new interpreter where this process must not be forked, and only the answer
comes back. Where no device can exist, there is nothing to ask and no process is started.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_testing_ext import _torch

NO_DEVICE: tuple[str | None, int] = (None, 0)
# These decide what CUDA and ROCm show; an answer holds as long as they stay the same.
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# A driver that wakes up many devices takes seconds; a child that needs longer than this is stuck.
FORK_TIMEOUT = 60.0
# How a forked child says that it would be told of no devices, as its parent has asked the driver already.
EXIT_SPOILT = 3


def device_count() -> int:
    """The number of accelerators this process may use."""
    return _devices()[1]


def accelerator_type() -> str | None:
    """`"cuda"`, `"xpu"`, ...: the type of the accelerators this process may use; None where there are none."""
    return _devices()[0]


def peers_have_access() -> bool:
    """Are there several CUDA devices, of compute capability 8.0 at least, that read each other's memory?"""
    return device_count() > 1 and accelerator_type() == "cuda" and _answer("ask_peer_access", _masks())


def _devices() -> tuple[str | None, int]:
    kind, count = _answer("ask_devices", _masks())
    return kind, count


def _masks() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in MASKS)


@functools.cache
def _answer(question: str, masks: tuple[str | None, ...]) -> Any:
    """The answer under these masks; it is asked for once."""
    if not device_may_exist():
        return NO_DEVICE
    if _torch.accelerator_is_initialised():
        return QUESTIONS[question]()
    answer = _ask_forked(question) if _may_fork() and not _torch.accelerator_is_in_bad_fork() else None
    return _ask_new_interpreter(question) if answer is None else answer


# -- the questions: put to the runtime, after which the process that asked cannot fork any more


def ask_devices() -> tuple[str | None, int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return NO_DEVICE if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def ask_peer_access() -> bool:
    devices = range(torch.cuda.device_count())
    if torch.cuda.get_device_capability() < (8, 0):
        return False
    return all(torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other)


QUESTIONS: dict[str, Callable[[], Any]] = {"ask_devices": ask_devices, "ask_peer_access": ask_peer_access}


# -- ways to put them


def device_may_exist(dev: Path = Path("/dev")) -> bool:
    """Could this torch find a device on this machine? No, only where that is certain."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return False
        if any(dev.glob("nvidia[0-9]*")) or any((dev / name).exists() for name in ("nvidiactl", "dxg", "kfd")):
            return True
        if sys.platform == "win32":
            return True
    return _torch.other_accelerator_is_built()


def _may_fork() -> bool:
    return hasattr(os, "fork") and threading.active_count() == 1


def _ask_forked(question: str) -> Any:
    """The answer of a forked child; None where it had none to give."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        # Native threads of idle pools (OpenBLAS) make Python 3.12 warn; this child runs into none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer_and_exit(question, send)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], FORK_TIMEOUT)
        said = pipe.read() if ready else b""
    if not ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == EXIT_SPOILT:
        return QUESTIONS[question]()  # this process has asked before, unnoticed: nothing is left to be spoilt
    return _read(said)


def _answer_and_exit(question: str, send: int) -> NoReturn:
    """In the forked child: write the answer and leave without running anything of the parent's."""
    code = 0
    try:
        if _torch.accelerator_is_in_bad_fork():
            code = EXIT_SPOILT
        else:
            tell(question, send)
    finally:
        os._exit(code)


def _ask_new_interpreter(question: str) -> Any:
    receive, send = os.pipe()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
    with os.fdopen(receive, "rb") as pipe:
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from torch_testing_ext._machine.accelerators import tell; tell({question!r}, {send})",
            ],
            pass_fds=[send],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(send)
        said = pipe.read()
    code = child.wait()
    answer = _read(said)
    if answer is None:
        raise RuntimeError(f"could not ask for the accelerators: the interpreter that should ended with code {code}")
    return answer


def tell(question: str, send: int) -> None:
    """In the process that was asked: put the question and write the answer."""
    os.write(send, json.dumps(QUESTIONS[question]()).encode())


def _read(said: bytes) -> Any:
    return json.loads(said) if said else None
