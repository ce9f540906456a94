"""A process that has imported torch, and forks programs of Python: `python program_server.py NAME READY`.

It listens on the abstract socket NAME, and ends when its standard input does. Imports nothing of this package.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from typing import NoReturn

LARGEST = 1 << 20
_PR_SET_PDEATHSIG = 1
# The time of a program goes into imports of these, more than into ours.
_MODULES = ("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor", "expecttest")


def main() -> None:
    name, ready = sys.argv[1], int(sys.argv[2])
    # The folder of this file.
    del sys.path[0]
    for module in _MODULES:
        __import__(module)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    os.close(ready)
    # No process of this one leaves a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        readable, _, _ = select.select([0, listener], [], [])
        if 0 in readable:
            return
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _serve(client)
        client.close()


def _serve(client: socket.socket) -> NoReturn:
    """Fork the program of a client, and tell it the wait status. The program ends with the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, fds, _, _ = socket.recv_fds(client, LARGEST, 253)
    if not data:
        os._exit(0)
    request = json.loads(data)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        client.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _run(request, fds)
    for fd in fds:
        os.close(fd)
    gone = os.pidfd_open(pid)
    while gone not in (readable := select.select([client, gone], [], [])[0]):
        assert client in readable
        # The client asks for its end, or has ended itself.
        os.kill(pid, signal.SIGKILL if client.recv(1) else signal.SIGTERM)
        select.select([gone], [], [], 5)
    _, status = os.waitpid(pid, 0)
    try:
        client.send(str(status).encode())
    finally:
        os._exit(0)


def _run(request: dict, fds: list[int]) -> NoReturn:
    """Become the program."""
    numbers = request["fds"]
    high = max([100, *numbers]) + 1
    # Out of the way of the numbers that they are to have.
    moved = [os.dup2(fd, high + index) for index, fd in enumerate(fds)]
    os.closerange(0, high)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stderr.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    kind, *words = request["words"]
    sys.orig_argv[1:] = request["words"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    code = 0
    try:
        if kind == "-m":
            sys.argv[:] = words
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.argv[:] = ["-c", *words[1:]]
            sys.path.insert(0, "")
            exec(compile(words[0], "<string>", "exec"), vars(main))
        else:
            sys.argv[:] = [kind, *words]
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            main.__file__ = os.path.abspath(kind)
            with open(kind, "rb") as file:
                exec(compile(file.read(), os.path.abspath(kind), "exec"), vars(main))
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
