"""Runs the set-up command and the agent of a node, and ends everything below them: a program that nodes get as text.

It imports nothing of this package, which the set-up may install. Its stdin begins with a line that says what to run;
the rest is for the agent. Its stdout begins with a line that says whether the agent has started; the rest is the
agent's.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from typing import Any, NoReturn

SETUP_LINES = 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Ended(Exception):
    """The process that started this one has ended, or wants this one to end."""


def main() -> NoReturn:
    """Words are the pid of the process that starts this one, and a folder that is removed at the end.

    A worker of Ray that ends kills its children by SIGKILL. So the supervisor is a child of that child.
    """
    # A worker of Ray blocks SIGINT.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    between = os.getpid()
    supervisor = os.fork()
    if not supervisor:
        _keep(between, sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(supervisor, signal.SIGTERM))
    _leave_streams()
    _exit_like(os.waitpid(supervisor, 0)[1])


def _keep(parent: int, folder: str) -> NoReturn:
    """Set the node up, start the agent, and wait for its end."""
    status = 0
    try:
        signal.signal(signal.SIGTERM, _on_sigterm)
        os.setsid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            status = _run(json.loads(_first_line()), folder)
    except _Ended:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()
        shutil.rmtree(folder, ignore_errors=True)
        _exit_like(status)


def _on_sigterm(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _leave_streams() -> None:
    for stream in 0, 1:
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)


def _first_line() -> bytes:
    """Read no further than the line: what comes after it is for the agent."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line.endswith(b"\n"):
        raise _Ended
    return line


def _run(job: dict[str, Any], folder: str) -> int:
    """Run the set-up and then the agent. Returns the wait status of the agent, or 0."""
    error = _set_up(job, folder) if job["setup"] else ""
    if error:
        _say(error)
        return 0
    # Before the agent says anything.
    _say("")
    with open(job["log"], "ab") as log:
        place = {"cwd": folder, "env": job["environ"], "stderr": log}
        agent = subprocess.Popen(job["words"], **place, start_new_session=True)
    # They are the agent's from here on.
    _leave_streams()
    while True:
        # Orphans of the set-up end here, too.
        pid, status = os.waitpid(-1, 0)
        if pid == agent.pid:
            return status


def _say(error: str) -> None:
    os.write(1, json.dumps({"error": error}).encode() + b"\n")


def _set_up(job: dict[str, Any], folder: str) -> str:
    """Run the command to its end, whatever it leaves running. Returns why it failed."""
    with open(os.path.join(folder, "setup.log"), "w+b") as log:
        done = subprocess.run(
            ["bash", "-c", job["setup"]],
            cwd=job["root"],
            env=job["environ"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    code = done.returncode
    if code == 0:
        return ""
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    last_lines = "\n".join(lines[-SETUP_LINES:])
    return f"cluster.setup {how}: {last_lines}" if last_lines else f"cluster.setup {how}"


def _end_children() -> None:
    """Kill all children, and the orphans that this process then adopts, until none is left."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def _exit_like(status: int) -> NoReturn:
    """End as the agent has ended, without a core dump."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    sys.exit(main())
