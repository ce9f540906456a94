"""Hides what only Linux has from an interpreter, and lets this package take the system for another one.

Not the whole interpreter: Python and torch were built for Linux.
"""

import builtins
import io
import os
import select
import signal
import socket
import sys

ONLY_ON_LINUX = {
    os: (
        *("eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "pipe2", "splice", "waitid"),
        *("sched_getaffinity", "sched_getscheduler", "sched_param", "sched_setaffinity", "sched_setscheduler"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMAX", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"),
    socket: ("SO_PEERCRED",),
}


def is_hidden(path):
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith("/proc")


def without_proc(function):
    def call(path=".", *args, **kwargs):
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return call


for owner, names in ONLY_ON_LINUX.items():
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
    setattr(os, name, without_proc(getattr(os, name)))
builtins.open = io.open = without_proc(io.open)

is_here, sys.platform = sys.platform, "darwin"
from torch_testing_ext._process import system

sys.platform = is_here
system.LOOPBACK = "lo"
