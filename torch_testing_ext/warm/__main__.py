"""Run a command of Python by a warm server: `python -m torch_testing_ext.warm COMMAND...`."""

from __future__ import annotations

import os
import sys

from .server_link import AskStatus, Message, ServerStatus, ServerStopped, StopServer, folder_of_servers
from .warm_client import WarmProgram, ask, run, sockets, warn

_USAGE = """\
usage: python -m torch_testing_ext.warm COMMAND [ARGUMENT...]
       python -m torch_testing_ext.warm status
       python -m torch_testing_ext.warm stop

COMMAND is a Python file, `-m MODULE`, `-c CODE`, `python ...`, or a program of this environment such as pytest. It
runs as without a server, but importing torch takes no time. docs/guides/warm.md says what a server guarantees."""


def main(words: list[str]) -> int:
    """Ask the servers, or run a command. Returns an exit code, unless a program has taken this process's place."""
    match words:
        case [] | ["-h"] | ["--help"]:
            print(_USAGE)
            return 0 if words else 2
        case ["status"]:
            _ask_all(AskStatus())
            return 0
        case ["stop"]:
            _ask_all(StopServer())
            return 0
    program = find_program(words)
    if program is None:
        return _exec_other(words)
    run(program)


def _ask_all(question: Message) -> None:
    """Ask every server of this user, and print the answers."""
    are_none = True
    for path in sockets(folder_of_servers()):
        match ask(path, question):
            case ServerStatus() as status:
                print(f"server {status.pid}: {status.runs} runs, {status.processes} processes")
                are_none = False
            case ServerStopped(pid=pid):
                print(f"stopped server {pid}")
                are_none = False
    if are_none:
        print("no server runs")


def find_program(words: list[str]) -> WarmProgram | None:
    """The program that a command starts in this Python; None if it is none, or has options for the interpreter."""
    path = _which(words[0])
    if path is not None and _is_this_python(path):
        words = words[1:]
        path = words[0] if words and os.path.isfile(words[0]) else None
    elif path is not None and not words[0].endswith(".py") and not _has_this_python(path):
        return None
    if len(words) > 1 and words[0] in ("-m", "-c"):
        return WarmProgram(words[0], words[1:])
    if path is None:
        return None
    word, *arguments = words
    # A program sees a file's name as it was given, but that of a script of this environment with its folder.
    return WarmProgram("file", [word if word.endswith(".py") else path, *arguments])


def _which(word: str) -> str | None:
    """The file of a command. Programs of this environment come first: they may not be in PATH."""
    if os.sep in word or word.endswith(".py"):
        return word if os.path.isfile(word) else None
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for folder_of_programs in (os.path.dirname(sys.executable), *folders):
        path = os.path.join(folder_of_programs, word)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _is_this_python(path: str) -> bool:
    if os.path.dirname(os.path.abspath(path)) != os.path.dirname(sys.executable):
        return False
    return os.path.realpath(path) == os.path.realpath(sys.executable)


def _has_this_python(path: str) -> bool:
    """Whether a file is a script for this Python."""
    try:
        with open(path, "rb") as file:
            first = file.readline(512).strip()
    except OSError:
        return False
    if not first.startswith(b"#!"):
        return False
    interpreter = first[2:].strip()
    return _is_this_python(os.fsdecode(interpreter))


def _exec_other(words: list[str]) -> int:
    """Run a command that is no program of this Python."""
    # An error, which Python reports.
    if words[0].startswith("-") or words[0].endswith(".py"):
        words = [sys.executable, *words]
    path = _which(words[0])
    if path is None:
        warn(f"{words[0]}: no such command")
        return 127
    if path != sys.executable:
        warn(f"{words[0]} is not a program that a server can run: running cold")
    try:
        os.execv(path, [path, *words[1:]])
    except OSError as error:
        warn(f"{words[0]} cannot be run: {error}")
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
