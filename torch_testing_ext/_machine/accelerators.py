"""The number and type of the accelerators, found without touching them from this process.

A process that asks CUDA or ROCm for its devices can no longer be forked into ranks that use them. So a forked child
asks, or a new interpreter where forking this process is not safe, and sends back the answer. Where no device can exist,
no process is started.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_testing_ext import _torch
from torch_testing_ext._process import fork_safety, reaping
from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.loop import wait_readable

NO_DEVICE: tuple[str | None, int] = (None, 0)
# These decide which devices the runtime shows: an answer holds while they stay the same.
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Set by run_test.py for a test with ranks on several nodes; the same as in launch/settings.py.
DEVICES_OF_TEST = "_TORCH_TESTING_EXT_DEVICES"
# A driver that initialises many devices takes seconds; a child that needs longer than this is stuck.
FORK_TIMEOUT = 60.0
# The exit code of a forked child that cannot ask, because its parent has already initialised the driver.
EXIT_BAD_FORK = 3


def device_count() -> int:
    """Return the number of accelerators that this process may use."""
    return _devices()[1]


def devices_of_test() -> int:
    """Return the number of accelerators that the ranks of the running test may use, on all of its nodes."""
    return max(device_count(), int(os.environ.get(DEVICES_OF_TEST) or 0))


def accelerator_type() -> str | None:
    """Return the type of the accelerators that this process may use (`"cuda"`, `"xpu"`, ...); None without any."""
    return _devices()[0]


def device_uuids() -> tuple[str, ...]:
    """Return what identifies each device, whatever its number is under the masks of this process; empty if unknown."""
    return tuple(_answer("ask_uuids", _masks())) if device_count() else ()


def runtime() -> str | None:
    """Return the type of the accelerators, with "hip" for those of ROCm, which torch calls "cuda"; None without any."""
    kind = accelerator_type()
    return "hip" if kind == "cuda" and torch.version.hip is not None else kind


def peers_have_access() -> bool:
    """Are there several CUDA devices of compute capability 8.0 or higher that can all read each other's memory?"""
    return device_count() > 1 and accelerator_type() == "cuda" and bool(_answer("ask_peer_access", _masks()))


def cuda_properties() -> dict[str, Any]:
    """Return what tests ask about the first CUDA or ROCm device; empty without one."""
    found = _answer("ask_cuda_properties", _masks())
    return found if isinstance(found, dict) else {}


def _devices() -> tuple[str | None, int]:
    kind, count = _answer("ask_devices", _masks())
    return kind, count


def _masks() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in MASKS)


@functools.cache
def _answer(question: str, masks: tuple[str | None, ...]) -> Any:
    """Ask once for each combination of masks."""
    if not device_may_exist():
        return NO_DEVICE
    if _torch.accelerator_is_initialised():
        return QUESTIONS[question]()
    answer = _ask_forked(question) if _may_fork() and not _torch.accelerator_is_in_bad_fork() else None
    return _ask_new_interpreter(question) if answer is None else answer


# -- the questions: after asking one, a process can no longer fork ranks that use devices


def ask_devices() -> tuple[str | None, int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return NO_DEVICE if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def ask_uuids() -> list[str]:
    kind, count = ask_devices()
    try:
        properties = torch.get_device_module(kind).get_device_properties if kind else None
        return [str(properties(number).uuid) for number in range(count)] if properties else []
    except Exception:  # not all kinds of devices have one
        return []


def ask_peer_access() -> bool:
    devices = range(torch.cuda.device_count())
    if torch.cuda.get_device_capability() < (8, 0):
        return False
    return all(torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other)


def ask_cuda_properties() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    backends: Any = torch.backends  # untyped in torch
    return {
        "capability": torch.cuda.get_device_capability(),
        "arch": getattr(torch.cuda.get_device_properties(0), "gcnArchName", ""),
        "accepts_cudnn": backends.cudnn.is_acceptable(torch.ones((), device="cuda")),
    }


QUESTIONS: dict[str, Callable[[], Any]] = {
    "ask_devices": ask_devices,
    "ask_uuids": ask_uuids,
    "ask_peer_access": ask_peer_access,
    "ask_cuda_properties": ask_cuda_properties,
}


# -- ways to ask them


def device_may_exist(dev: Path = Path("/dev")) -> bool:
    """Could this torch find a device on this machine? False only where that is certain."""
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
    """Let a forked child ask; None where it gave no answer."""
    receive, send = os.pipe()
    pid = fork_safety.fork()  # even with native threads in idle pools (OpenBLAS): the child takes none of their locks
    if pid == 0:
        _answer_and_exit(question, send)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        ready = wait_readable(pipe, time.monotonic() + FORK_TIMEOUT)
        text = pipe.read() if ready else b""
    if not ready:
        os.kill(pid, signal.SIGKILL)
    if reaping.wait_for_exit(pid) == EXIT_BAD_FORK:
        return QUESTIONS[question]()  # this process has initialised the driver before: asking here does no more harm
    return _parse(text)


def _answer_and_exit(question: str, send: int) -> NoReturn:
    """In the forked child: write the answer and exit without running the parent's exit handlers."""
    code = 0
    try:
        if _torch.accelerator_is_in_bad_fork():
            code = EXIT_BAD_FORK
        else:
            write_answer(question, send)
    finally:
        os._exit(code)


def _ask_new_interpreter(question: str) -> Any:
    receive, send = os.pipe()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
    code = f"from torch_testing_ext._machine.accelerators import write_answer; write_answer({question!r}, {send})"
    with os.fdopen(receive, "rb") as pipe:
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[send], env=environment, stdin=subprocess.DEVNULL
        )
        os.close(send)
        text = pipe.read()
    ended = describe_exit(child.wait())
    answer = _parse(text)
    if answer is None:
        raise RuntimeError(f"cannot count the accelerators: the interpreter started to ask {ended}")
    return answer


def write_answer(question: str, send: int) -> None:
    """In the child process: ask the runtime and write its answer to the pipe."""
    os.write(send, json.dumps(QUESTIONS[question]()).encode())


def _parse(text: bytes) -> Any:
    return json.loads(text) if text else None
