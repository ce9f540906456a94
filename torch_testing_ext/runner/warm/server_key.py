"""The key of a server: everything in which two runs of one project may differ so that they need another server."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch_testing_ext import __version__
from torch_testing_ext._process.terminal_variables import is_of_terminal

# Lines of /proc/self/status that a process inherits.
_STATUS = (
    *("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp", "Speculation"),
    *("SigBlk:", "SigIgn:", "Cpus_allowed:", "Mems_allowed:"),
)
_LINKS = ("root", *(f"ns/{name}" for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")))
_FILES = ("cgroup", "attr/current", "personality", "oom_score_adj", "coredump_filter", "timerslack_ns")


def project_key(root: Path) -> str:
    """The key of a project in this environment: all of its servers share it."""
    return _digest((str(root), sys.executable))


def server_key(path: Sequence[str], environ: Mapping[str, str]) -> str:
    """The key of the server of this process. `path`, `environ`: the server's sys.path and its variables."""
    interpreter = (__version__, sys.version, sys.prefix, tuple(sys.flags), sys.warnoptions, [*path])
    options = sorted(repr(option) for option in sys._xoptions.items())
    variables = sorted(item for item in environ.items() if not is_of_terminal(item[0]))
    scheduling = (sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    status = [line for line in _read("status").splitlines() if line.startswith(_STATUS)]
    links = [_target(name) for name in _LINKS]
    files = [_read(name) for name in _FILES]
    return _digest((interpreter, options, variables, os.getcwd(), _limits(), scheduling, status, links, files))


def _digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(errors="surrogateescape"), digest_size=12).hexdigest()


def _limits() -> list[tuple[int, int]]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [resource.getrlimit(getattr(resource, name)) for name in names]


def _target(name: str) -> str:
    """The target of a link of this process in /proc; nothing if there is none."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/{name}")
    return ""


def _read(name: str) -> str:
    """The text of a file of this process in /proc; nothing if it cannot be read."""
    with suppress(OSError), open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
