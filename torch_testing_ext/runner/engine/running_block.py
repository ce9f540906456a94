"""The ranks on this node of a unit that runs on several, as the agent of the node sees them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.exits import describe_exit
from torch_testing_ext._process.logs import read_ends, tail
from torch_testing_ext.launch.protocol import FromServer

from ..processes.protocol import EndWorker, FromNanny, KillWorker, WorkerBroke, WorkerEnded
from ..processes.unit_spec import UnitSpec
from ..processes.zygote import Zygote
from .running_unit import LOGS, NANNY_PATIENCE, STREAM

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
        self._loop = zygote.loop
        self._zygote = zygote
        self._listener = listener
        self._file = zygote.file(file)
        self._broke = ""
        self._over = False
        self._printed = 0
        with ExitStack() as on_failure:
            self._spec = self._make_spec(environ, stream)
            on_failure.callback(shutil.rmtree, self._spec.directory, ignore_errors=True)
            nanny, theirs_of_nanny = map(on_failure.enter_context, socket_pair())
            worker, theirs_of_worker = map(on_failure.enter_context, socket_pair())
            self._file.start(self._spec, theirs_of_nanny, theirs_of_worker, self._gone, locks)
            on_failure.pop_all()
        self._nanny: Channel[FromNanny] = Channel(nanny, FromNanny)
        self._worker: Channel[FromBlock] = Channel(worker, FromBlock)
        self._loop.listen(self._nanny, self._receive_from_nanny)
        self._loop.listen(self._worker, self._receive_from_worker)

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
        self._worker.send_line(line)

    def end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        self._nanny.send(EndWorker())
        self._loop.after(NANNY_PATIENCE, lambda: None if self._over else self._file.kill(self.number))

    def kill(self) -> None:
        self._nanny.send(KillWorker())

    def new_output(self) -> str:
        """The output since the last call."""
        size = self._spec.log.stat().st_size if self._spec.log.exists() else 0
        seen, self._printed = self._printed, size
        return read_ends(self._spec.log, seen, size)

    # -- reports of its processes

    def _receive_from_worker(self) -> None:
        try:
            received = self._worker.receive()
        except EOFError:
            self._loop.forget(self._worker)
            return
        for message in received:
            self._on_message(message)

    def _on_message(self, message: FromBlock) -> None:
        if isinstance(message, WorkerBroke):
            self._broke = message.message
        else:
            self._listener.block_said(self, message)

    def _receive_from_nanny(self) -> None:
        try:
            received = self._nanny.receive()
        except EOFError:
            self._loop.forget(self._nanny)
            return
        for message in received:
            if isinstance(message, WorkerEnded):
                self._conclude(describe_exit(os.waitstatus_to_exitcode(message.status)))

    def _gone(self, how: str) -> None:
        """The nanny has ended, and nothing that the block started is left."""
        for message in self._nanny.receive_available() if not self._over else ():
            if isinstance(message, WorkerEnded):
                self._conclude(describe_exit(os.waitstatus_to_exitcode(message.status)))
        if not self._over:
            not_imported = self._file.broken.message if self._file.broken is not None else ""
            self._conclude(self._zygote.failure or not_imported or how)

    def _conclude(self, how: str) -> None:
        self._over = True
        for message in self._worker.receive_available():
            self._on_message(message)
        said = self._broke or tail(Path(self._spec.log), 5)
        for channel in (self._nanny, self._worker):
            self._loop.forget(channel)
            channel.close()
        self._listener.block_ended(
            self, f"the process that starts the ranks there {how}" + (f": {said}" if said else "")
        )
        shutil.rmtree(self._spec.directory, ignore_errors=True)
