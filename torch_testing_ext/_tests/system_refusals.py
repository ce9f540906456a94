"""Refusals of the system to a process that runs tests, each with what to do about it."""

import errno
import os
import tempfile
from pathlib import Path

from torch_testing_ext._process import setting_names
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.system import LOOPBACK

# Advice that names what the user can change, by the error of the system.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (*_NO_ROOM, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)
LIMIT_OF_PROCESSES = (
    "The limit of processes and threads is reached: raise it (ulimit -u; pids.max of a container), or start fewer ranks"
)
NO_LOOPBACK = f"Enable the loopback interface (ip link set {LOOPBACK} up)"
_LIMITS = {
    errno.EAGAIN: LIMIT_OF_PROCESSES,
    errno.ENOMEM: "The memory is used up: end other processes, or start fewer ranks at once",
    errno.EMFILE: "The limit of open files is reached: raise it (ulimit -n)",
    errno.EFBIG: "The limit of the size of a file is reached: raise it (ulimit -f)",
    errno.ENFILE: "All processes of this machine together have too many open files",
}


def why_refused(error: OSError) -> str:
    """Say what the system has refused, and what to do about it."""
    if error.errno == errno.EACCES and (umask := _umask()) & 0o700:
        return f"{error}. The umask is {umask:03o}, which closes new files to yourself: set it to 022 (umask 022)"
    if error.errno in _NO_FOLDER:
        logs = os.environ.get(setting_names.LOGS, "")
        try:
            temporary = tempfile.gettempdir()
        except OSError:
            return f"{error}. Set TMPDIR to a folder that can be written to"
        # The runner sets that to a folder of its own.
        is_chosen = logs and not logs.startswith(f"{temporary}/")
        name = setting_names.LOGS if is_chosen else "TMPDIR"
        begin = "Free disk space, or set" if error.errno in _NO_ROOM else "Set"
        folder = logs if is_chosen else temporary
        return f"{error}. {begin} {name} to a folder that can be written to; it is {folder} now"
    return f"{error}. {_LIMITS[error.errno]}" if error.errno in _LIMITS else str(error)


def _umask() -> int:
    """The umask of this process; 0 if the system does not show it."""
    values = (line.split()[1] for line in text_of(Path("/proc/self/status")).splitlines() if line.startswith("Umask:"))
    return int(next(values, "0"), 8)
