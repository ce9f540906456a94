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
    from _md5 import md5  # hashlib takes milliseconds to import
except ImportError:  # an interpreter that leaves it to OpenSSL
    from hashlib import md5

# Read by the interpreter, the loader or the C library when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
# Lines of /proc/self/status that a fork inherits and cannot set back.
_STATUS = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp", "Cpus_allowed:", "Mems_allowed:", "Speculation")
_LINKS = ("root", *(f"ns/{name}" for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")))
_FILES = ("cgroup", "attr/current", "personality", "oom_score_adj", "coredump_filter", "timerslack_ns")


def server_key(path: list[str]) -> str:
    """The key for this process. `path`: its sys.path without the entry of the program."""
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    facts = (
        (__version__, sys.executable, sys.version, sys.prefix, tuple(sys.flags), sys.warnoptions, path),
        sorted(map(repr, sys._xoptions.items())),
        sorted(item for item in os.environ.items() if item[0].startswith(_READ_AT_START)),
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        (sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
        [line for line in _read("status").splitlines() if line.startswith(_STATUS)],
        [os.readlink(f"/proc/self/{name}") if os.path.lexists(f"/proc/self/{name}") else "" for name in _LINKS],
        [_read(name) for name in _FILES],
    )
    return str(md5(repr(facts).encode(errors="surrogateescape")).hexdigest())


def _read(name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", errors="replace") as file:
        return file.read()
    return ""


def path_of_servers() -> list[str]:
    """This process's sys.path without the entry that `python -m` has put in front."""
    safe = getattr(sys.flags, "safe_path", False)
    return [entry for entry in sys.path[0 if safe else 1 :] if isinstance(entry, str)]


def folder() -> str:
    """The private folder of this user's servers. Raises OSError if it cannot be made, or trusted."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = os.path.join(runtime if os.path.isdir(runtime) else "/tmp", f"torch_testing_ext_warm_{os.getuid()}")
    try:
        return make_private(path, refused=0o077)
    except UnsafeFolder as error:
        raise PermissionError(str(error)) from None
