"""The ranks on this node of a unit that runs on several, as the agent of the node sees them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.logs import tail
from torch_testing_ext.launch.protocol import FromServer

from ..processes.protocol import WorkerBroke, WorkerEnded
from ..processes.unit_spec import UnitSpec
from ..processes.zygote import Zygote
from .running_unit import LOGS, STREAM
from .unit_processes import UnitProcesses

FromBlock = FromServer | WorkerBroke


class BlockListener(Protocol):
    """Receives the events of a block."""

    def block_said(self, block: RunningBlock, message: FromServer) -> None: ...
    def block_ended(self, block: RunningBlock, why: str) -> None: ...


class RunningBlock:
    """A process that starts ranks at the request of a unit's main process on another node, and all that it starts."""

    def __init__(
        self,
        number: int,
        file: str,
        zygote: Zygote,
        environ: Mapping[str, str],
        listener: BlockListener,
        stream: bool = False,
        locks: tuple[int, ...] = (),
    ):
        """Starts the process. Raises OSError, and leaves nothing behind, if the system refuses what it needs."""
        self.number = number
        self.file = file
        self._zygote = zygote
        self._listener = listener
        self._file = zygote.file(file)
        self._broke = ""
        self._ended_for = ""  # why it was ended for the memory of the node
        self._spec = self._make_spec(environ, stream)
        self._processes: UnitProcesses[FromBlock] = UnitProcesses(
            self._file, self._spec, FromBlock, zygote.loop, self, locks
        )

    def _make_spec(self, environ: Mapping[str, str], stream: bool) -> UnitSpec:
        directory = self._zygote.directory / f"block{self.number}"
        directory.mkdir()
        more = {LOGS: "", **({STREAM: "1"} if stream else {})}
        return UnitSpec(
            self.number,
            str(self._file.path),
            self._file.load_as,
            str(self._zygote.root),
            (),
            (),
            (),
            str(directory),
            str(directory / "ranks"),
            {**environ, **more},
            is_block=True,
        )

    # -- requests

    def send(self, line: str) -> None:
        """Pass on a message to the process, which is JSON already. If it is gone, only its end shows it."""
        self._processes.send(line)

    def end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        self._processes.end()

    def kill(self) -> None:
        self._processes.kill()

    def end_for_memory(self, why: str, crowded: bool) -> None:
        """End it at once, since the node's memory is nearly used up."""
        self._ended_for = why
        self._processes.kill()

    def measure_memory(self, answer: Callable[[int], object]) -> None:
        self._processes.measure_memory(answer)

    def new_output(self) -> str:
        """The output since the last call."""
        return self._processes.new_output()

    # -- reports of its processes

    def worker_said(self, message: FromBlock) -> None:
        if isinstance(message, WorkerBroke):
            self._broke = message.message
        else:
            self._listener.block_said(self, message)

    def stacks_taken(self) -> None:
        """The main process of the unit takes them itself."""

    def processes_ended(self, end: WorkerEnded) -> None:
        how = describe_exit(os.waitstatus_to_exitcode(end.status))
        self._conclude(f"was ended: {self._ended_for}" if self._ended_for else how)

    def processes_lost(self, how: str) -> None:
        not_imported = self._file.broken.message if self._file.broken is not None else ""
        self._conclude(self._zygote.failure or not_imported or how)

    def _conclude(self, how: str) -> None:
        for message in self._processes.last_messages():
            self.worker_said(message)
        said = self._broke or tail(Path(self._spec.log), 5)
        self._processes.close()
        self._listener.block_ended(
            self, f"the process that starts the ranks there {how}" + (f": {said}" if said else "")
        )
        self._processes.remove_files()
