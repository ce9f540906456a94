"""Run a command of Python by a warm server: `python -m torch_testing_ext.warm COMMAND...`."""

from __future__ import annotations

import os
import sys

from .server_key import folder
from .warm_client import WarmProgram, ask, run, sockets, warn

_USAGE = """\
usage: python -m torch_testing_ext.warm COMMAND [ARGUMENT...]
       python -m torch_testing_ext.warm status
       python -m torch_testing_ext.warm stop

COMMAND is a Python file, `-m MODULE`, `-c CODE`, `python ...`, or a program of this environment such as pytest. It
runs as without a server, but importing torch takes no time. docs/warm.md says what a server guarantees."""


def main(words: list[str]) -> int:
    match words:
        case [] | ["-h"] | ["--help"]:
            print(_USAGE)
            return 0 if words else 2
        case ["status" | "stop" as question]:
            answers = [answer for path in sockets(folder()) if (answer := ask(path, question)) is not None]
            for one in answers:
                counts = "" if question == "stop" else f": {one['runs']} runs, {one['processes']} processes"
                print(f"stopped server {one['stopped']}" if question == "stop" else f"server {one['pid']}{counts}")
            if not answers:
                print("no server runs")
            return 0
    if (program := find_program(words)) is None:
        return _exec_other(words)
    run(program)


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
    return None if path is None else WarmProgram("file", [words[0] if words[0].endswith(".py") else path, *words[1:]])


def _which(word: str) -> str | None:
    """The file of a command. Programs of this environment come first: they may not be in PATH."""
    if os.sep in word or word.endswith(".py"):
        return word if os.path.isfile(word) else None
    for place in (os.path.dirname(sys.executable), *os.environ.get("PATH", os.defpath).split(os.pathsep)):
        path = os.path.join(place, word)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _is_this_python(path: str) -> bool:
    here = os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable)
    return here and os.path.realpath(path) == os.path.realpath(sys.executable)


def _has_this_python(path: str) -> bool:
    """Whether a file is a script for this Python."""
    try:
        with open(path, "rb") as file:
            first = file.readline(512).strip()
    except OSError:
        return False
    return first.startswith(b"#!") and _is_this_python(os.fsdecode(first[2:].strip()))


def _exec_other(words: list[str]) -> int:
    """Run a command that is no program of this Python."""
    if words[0].startswith("-") or words[0].endswith(".py"):  # an error, which Python reports
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
