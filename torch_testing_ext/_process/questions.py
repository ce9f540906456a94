"""Questions to another process, each with a time limit: a function there gives the answer.

What asks a driver can no longer be forked into ranks that use its devices, and a driver that does not answer blocks the
process that asks: neither may be this one.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch_testing_ext._process import fork_safety

from . import ends, interpreters, system

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

# A process that a driver blocks takes no signal: the kernel ends it once the driver answers.
_KILL_TIMEOUT = 2.0


class By(enum.Enum):
    """The kinds of other processes."""

    FORK = "a child that is forked from this process"
    INTERPRETER = "a new interpreter"


class Silence(enum.Enum):
    """The reasons for which there is no answer."""

    LATE = "the process has not answered in time"
    ENDED = "the process has ended"
    REFUSED = "the question has raised an error"


class NoAnswer(Exception):
    """Another process has given no answer; the text says why, in one line."""

    def __init__(self, text: str, silence: Silence):
        super().__init__(text)
        self.silence = silence


class OtherProcess:
    """Answers questions until it is closed, or this process ends. It is asked no more once it has not answered."""

    def __init__(
        self,
        by: By,
        who: str,
        timeout: float,
        path: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        """`who`: whom it asks, for messages. `path` and `environ`: of a new interpreter, by default those from here."""
        # Few processes ask, and this import takes milliseconds.
        from multiprocessing.connection import Pipe

        self._who = who
        self._timeout = timeout
        self._failure: tuple[str, Silence] | None = None
        self._connection, theirs = Pipe()
        with theirs:
            if by is By.FORK:
                self._process: _Process = _ForkedProcess(self._connection, theirs)
            else:
                self._process = _start_interpreter(theirs, sys.path if path is None else path, environ)

    def ask(self, question: Callable[..., T], *arguments: object) -> T:
        """Ask for the result of `question`, a function of a module, there. Raises NoAnswer."""
        if self._failure is None:
            try:
                self._connection.send((question, arguments))
                if not self._connection.poll(self._timeout):
                    self._fail(f"{self._who} has not answered within {self._timeout:g} s", Silence.LATE)
                else:
                    answer, refusal = self._connection.recv()
                    if refusal is None:
                        return answer  # type: ignore[no-any-return]
                    self._fail(refusal, Silence.REFUSED)
            except (EOFError, OSError):
                code = self._process.wait(_KILL_TIMEOUT)
                self._fail(f"the process that asks {self._who} {ends.describe_exit(code)}", Silence.ENDED)
        assert self._failure is not None
        raise NoAnswer(*self._failure)

    def _fail(self, why: str, silence: Silence) -> None:
        self._failure = why, silence
        self.close()

    def close(self) -> None:
        self._failure = self._failure or (f"{self._who} is no longer asked", Silence.ENDED)
        self._connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT)


def ask_elsewhere(question: Callable[..., T], *arguments: object, by: By, who: str, timeout: float) -> T:
    """Ask another process, which then ends, for the result of `question`, a function of a module. Raises NoAnswer."""
    with closing(OtherProcess(by, who, timeout)) as process:
        return process.ask(question, *arguments)


class _Process(Protocol):
    """The common part of a forked process and a `subprocess.Popen`."""

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int | None: ...


class _ForkedProcess:
    """A child that answers questions, even with native threads in idle pools (OpenBLAS): it takes none of their locks.

    It has the methods of a `subprocess.Popen`.
    """

    def __init__(self, ours: Connection, theirs: Connection):
        parent = os.getpid()
        self._has_ended = False
        self._pid = fork_safety.fork()
        if self._pid == 0:
            # The exit handlers of the parent are not for it.
            try:
                ours.close()
                system.die_with(parent, signal.SIGKILL)
                _answer_questions(theirs)
            finally:
                os._exit(0)

    def kill(self) -> None:
        if not self._has_ended:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int | None:
        if self._has_ended:
            return None
        if not ends.has_ended(self._pid, timeout):
            raise subprocess.TimeoutExpired("a forked child", timeout)
        self._has_ended = True
        return ends.wait_for_exit(self._pid)


def _start_interpreter(
    theirs: Connection, path: Sequence[str], environ: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    words = [str(theirs.fileno()), str(os.getpid())]
    return subprocess.Popen(
        interpreters.command("_process.questions", path, *words),
        env=environ,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Run in a new interpreter, as `-c "...main()" DESCRIPTOR PARENT`."""
    from multiprocessing.connection import Connection

    _, descriptor, parent = sys.argv
    system.die_with(int(parent), signal.SIGKILL)
    _answer_questions(Connection(int(descriptor)))


def _answer_questions(connection: Connection) -> None:
    with suppress(EOFError):
        while True:
            question, arguments = connection.recv()
            connection.send(_answer(question, arguments))


def _answer(question: Callable[..., Any], arguments: Sequence[object]) -> tuple[Any, str | None]:
    """The answer, and the text of the error if there is none."""
    try:
        return question(*arguments), None
    except Exception as error:
        text = " ".join(str(error).split())
        return None, text or type(error).__name__
