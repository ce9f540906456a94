"""The fork server of a node that has ranks of a test whose main process is on another node.

It is one like any other, but sends what its ranks write: only the main process judges them.
"""

from __future__ import annotations

import os
import pickle
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.logs import read_ends

from . import settings
from .fork_server import ForkServer
from .job import Job, ProcessContext
from .protocol import (
    CloseStore,
    Dumped,
    Exited,
    FileOfRun,
    FromServer,
    LaunchBlock,
    Look,
    StartMethod,
    ToServer,
)

# When the answers to a look are looked for, in seconds after it: they are files, and nothing tells that one is there.
_LOOKS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
_LOG_INTERVAL = 0.04  # of the logs of ranks that are sanitized
_HEADER_OF_LOG = 1024
_OURS = ("job", "creating")  # files that serve the ranks of this node alone


@dataclass
class _Sent:
    """A run, and which versions of its files have been sent."""

    job: Job
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)


class NodeServer(ForkServer):
    """Starts the ranks of one node, and sends what they write."""

    def __init__(self, client: Channel[ToServer], directory: Path, method: StartMethod, parent: int):
        super().__init__(client, directory, method, parent)
        self._runs: dict[int, _Sent] = {}
        self._safe_method = method

    def _on_message(self, message: ToServer) -> None:
        match message:
            case LaunchBlock(run, job, environ, unset):
                here = self._here(run, pickle.loads(job), environ, unset)
                self._runs[run] = _Sent(here)
                wants_spawn = here.differs_in_hash or settings.read(here.context.environ).start == "spawn"
                self._method = StartMethod.SPAWN if wants_spawn else self._safe_method
                self._launch(run, here)
                if here.sanitize and here.sanitize.kinds:
                    self._loop.after(_LOG_INTERVAL, partial(self._send_sanitizer_logs, run))
            case CloseStore(run):
                self._runs.pop(run, None)
            case Look(run, _):
                super()._on_message(message)
                for delay in _LOOKS:
                    self._loop.after(delay, partial(self._send_files, run, ".look"))
            case _:
                super()._on_message(message)

    def _here(self, run: int, job: Job, environ: Mapping[str, str], unset: tuple[str, ...]) -> Job:
        """The job with the folders and the environment of this node."""
        directory = self._directory / f"run{run}"
        directory.mkdir(parents=True)
        kept = {name: text for name, text in os.environ.items() if name not in unset}
        context = ProcessContext({**kept, **environ}, os.getcwd(), tuple(sys.path), tuple(sys.argv))
        arguments = {name: _moved(value, job.directory, directory) for name, value in job.arguments.items()}
        return replace(job, directory=directory, context=context, arguments=arguments)

    def _send(self, message: FromServer) -> None:
        if isinstance(message, (Exited, Dumped)):
            self._send_files(message.run)
        super()._send(message)

    def _send_files(self, run: int, suffix: str = "") -> None:
        """Send the files of a run that are new or have changed."""
        sent = self._runs.get(run)
        if sent is None:
            return
        for path in sorted(sent.job.directory.glob(f"*{suffix}")):
            if path.suffix != ".new" and path.name not in _OURS:
                self._send_file(run, sent, path)

    def _send_file(self, run: int, sent: _Sent, path: Path) -> None:
        try:
            now = path.stat()
            version = now.st_mtime_ns, now.st_size
            if not path.is_file() or sent.files.get(path.name) == version:
                return
            data = read_ends(path).encode() if path.suffix in (".log", ".stacks") else path.read_bytes()
        except OSError:
            return
        sent.files[path.name] = version
        super()._send(FileOfRun(run, path.name, zlib.compress(data, 1)))

    def _send_sanitizer_logs(self, run: int) -> None:
        """The main process compares what ranks issue while they run."""
        sent = self._runs.get(run)
        if sent is None:
            return
        for path in sorted(sent.job.directory.glob("*.sanitizer")):
            with path.open("rb") as file:
                header = file.read(_HEADER_OF_LOG)
            if sent.headers.get(path.name) != header:
                sent.headers[path.name] = header
                sent.files.pop(path.name, None)
                self._send_file(run, sent, path)
        self._loop.after(_LOG_INTERVAL, partial(self._send_sanitizer_logs, run))


def _moved(value: Any, there: Path, here: Path) -> Any:
    """A path of the main process's folder for the files of a run, in that of this node."""
    if isinstance(value, (str, Path)) and Path(value).is_relative_to(there):
        return type(value)(here / Path(value).relative_to(there))
    return value


def serve(client: Channel[ToServer], directory: Path) -> NoReturn:
    """Serve in this process, which has imported the test file. Never returns."""
    from torch_testing_ext import _torch
    from torch_testing_ext._machine import accelerators

    method = StartMethod.SPAWN if accelerators.check_to_fork() else StartMethod.FORK_FRESH
    system.adopt_orphans()
    _torch.forget_groups()
    directory.mkdir(parents=True, exist_ok=True)
    NodeServer(client, directory, method, os.getppid()).serve()
