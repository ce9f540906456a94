"""The key of a server: everything in which the processes of two clients could differ, but for what each hands over.

A client hands over its variables, working directory, umask, descriptors and signals. Whatever else differs, such as a
limit, a right or a namespace, leads to another server.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from torch_testing_ext import __version__
from torch_testing_ext._process.private_folders import UnsafeFolder, make_private

try:
    # hashlib takes milliseconds to import.
    from _md5 import md5
except ImportError:
    # This interpreter leaves it to OpenSSL.
    from hashlib import md5

# Read by the interpreter, the loader or the C library when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
# Lines of /proc/self/status that a fork inherits and cannot set back.
_STATUS = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp", "Cpus_allowed:", "Mems_allowed:", "Speculation")
_LINKS = ("root", *(f"ns/{name}" for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")))
_FILES = ("cgroup", "attr/current", "personality", "oom_score_adj", "coredump_filter", "timerslack_ns")


def server_key(path: list[str]) -> str:
    """The key for this process. `path`: its sys.path without the entry of the program."""
    interpreter = (__version__, sys.executable, sys.version, sys.prefix, tuple(sys.flags), sys.warnoptions, path)
    options = sorted(repr(option) for option in sys._xoptions.items())
    environ = sorted((name, value) for name, value in os.environ.items() if name.startswith(_READ_AT_START))
    scheduling = (sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    status = [line for line in _read("status").splitlines() if line.startswith(_STATUS)]
    links = [_target(name) for name in _LINKS]
    files = [_read(name) for name in _FILES]
    facts = (interpreter, options, environ, _limits(), scheduling, status, links, files)
    digest: str = md5(repr(facts).encode(errors="surrogateescape")).hexdigest()
    return digest


def _limits() -> list[tuple[int, int]]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [resource.getrlimit(getattr(resource, name)) for name in names]


def _target(name: str) -> str:
    """The target of a link of this process in /proc; nothing if there is none."""
    path = f"/proc/self/{name}"
    return os.readlink(path) if os.path.lexists(path) else ""


def _read(name: str) -> str:
    """The text of a file of this process in /proc; nothing if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", errors="replace") as file:
        return file.read()
    return ""


def path_of_servers() -> list[str]:
    """This process's sys.path without the entry that `python -m` has put in front."""
    # Python has this flag since 3.11.
    is_safe = getattr(sys.flags, "safe_path", False)
    entries = sys.path if is_safe else sys.path[1:]
    return [entry for entry in entries if isinstance(entry, str)]


def folder() -> str:
    """The private folder of this user's servers. Raises OSError if it cannot be made, or trusted."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.path.isdir(runtime) else "/tmp"
    path = os.path.join(parent, f"torch_testing_ext_warm_{os.getuid()}")
    try:
        return make_private(path, refused=0o077)
    except UnsafeFolder as error:
        raise PermissionError(str(error)) from None
