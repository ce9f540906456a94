"""A rank as its parent sees it."""

from __future__ import annotations

import signal

from torch_testing_ext import launch


class RankProcess:
    """One rank as the parent sees it, in the manner of multiprocessing.Process."""

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
        return self.exitcode is None and self._run.lost is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        until = None if timeout is None else launch.now() + timeout
        while self.rank in self._run.alive and self._run.wait_for_news(until):
            pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._run.signal(number, self.rank)
