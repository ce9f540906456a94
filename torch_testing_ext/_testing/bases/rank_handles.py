"""A rank that is a process, with the interface of multiprocessing: its handle in the parent, and their pipe."""

from __future__ import annotations

import enum
import os
import signal
from contextlib import suppress
from typing import Any

from torch_testing_ext import launch

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


# The seconds for the stacks of a rank; PyTorch waits as long.
STACKS_TIMEOUT = 5.0


class RankProcess:
    """The parent's handle of one rank, with the interface of multiprocessing.Process."""

    def __init__(self, run: launch.Run, rank: int):
        self._run = run
        self.rank = rank
        self.name = f"process {rank}"

    @property
    def pid(self) -> int:
        return self._run.pids[self.rank]

    @property
    def exitcode(self) -> int | None:
        self.join(timeout=0)
        ended = self._run.exits.get(self.rank)
        return ended.code if ended else None

    def is_alive(self) -> bool:
        return self.exitcode is None and not self._run.lost

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else launch.now() + timeout
        while self.rank in self._run.alive and self._run.wait_for_event(until):
            pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._run.signal(number, self.rank)


class UnstartedRank:
    """Stands for a rank that would have skipped, with the interface of multiprocessing.Process."""

    pid = None

    def __init__(self, rank: int, exitcode: int):
        self.rank = rank
        self.name = f"process {rank}"
        self.exitcode = exitcode

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class RankEvent(enum.Enum):
    """A request of PyTorch's parent to a rank: `MultiProcessTestCase.Event`."""

    GET_TRACEBACK = 1


class PipeFromRank:
    """The parent's end of the pipe that PyTorch has to each rank: it gives the text of the rank's exception.

    Of a running rank that was sent `RankEvent.GET_TRACEBACK`, it gives the stacks.
    """

    def __init__(self, run: launch.Run, rank: int):
        self._run = run
        self._rank = RankProcess(run, rank)
        self._received = False
        self._stacks: list[str] = []
        self.closed = False

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Wait until the rank has ended, unless it was asked for its stacks. Returns whether there is a text."""
        if self._stacks:
            return True
        self._rank.join(timeout)
        return self._rank.rank not in self._run.alive and not self._received and self._text() is not None

    def recv(self) -> str:
        if not self.poll(None):
            raise EOFError
        if self._stacks:
            return self._stacks.pop(0)
        self._received = True
        return self._text() or ""

    def _text(self) -> str | None:
        account = launch.read_account(self._run.job.account(self._rank.rank))
        return account.traceback or None if account else None

    def send(self, value: Any) -> None:
        rank = self._rank.rank
        if value is RankEvent.GET_TRACEBACK and rank in self._run.alive:
            self._run.dump(STACKS_TIMEOUT, [rank])
            file = self._run.job.stacks(rank)
            with suppress(OSError):
                if text := file.read_text(encoding="utf-8", errors="replace"):
                    self._stacks.append(text)
                # The failure has stacks of its own.
                os.truncate(file, 0)

    def close(self) -> None:
        self.closed = True


class PipeToParent:
    """The rank's end of that pipe; in all other respects it is the rank's AccountWriter."""

    def __init__(self, account: launch.AccountWriter):
        self.account_writer = account
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        # A copy has no attributes yet.
        if name == "account_writer":
            raise AttributeError(name)
        return getattr(self.account_writer, name)

    def send(self, value: Any) -> None:
        """Keep the text of an exception, which an overriding `run_test` sends before it exits."""
        if isinstance(value, str):
            self.account_writer.sent_text = value

    def poll(self, timeout: float | None = 0.0) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class ConnectionAccount(launch.AccountWriter):
    """The account of a rank that a test has started itself, as a process of multiprocessing."""

    def __init__(self, connection: Any):
        super().__init__(None)
        self._connection = connection

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        if self.account is None:
            with suppress(AttributeError, OSError):
                self._connection.send(within + launch.format_error(error))
        super().failed(error, assertion, within, traceback)


def account_behind(pipe: Any) -> launch.AccountWriter:
    """Return the account to write in a rank whose `run_test` was given this pipe, or one of the test's own making."""
    if isinstance(pipe, launch.AccountWriter):
        return pipe
    context = launch.current_context()
    return ConnectionAccount(pipe) if context is None else context.account
