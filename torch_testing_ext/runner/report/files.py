"""Reports that are files: written when the run is over, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..events import Event, RunEnded
from .recorder import History, Recorder

Render = Callable[[History], str]


@dataclass
class Files:
    """One recorder for all of them. What cannot be written is a warning: the run's outcome stands."""

    wanted: dict[Path, Render]
    warn: Callable[[str], None]
    _recorder: Recorder = field(default_factory=Recorder)

    def on_event(self, event: Event) -> None:
        self._recorder.on_event(event)
        if isinstance(event, RunEnded):
            history = self._recorder.tell(event)
            for path, render in self.wanted.items():
                self._write(path, render, history)

    def _write(self, path: Path, render: Render, history: History) -> None:
        try:
            write_whole(path, render(history))
        except OSError as error:
            self.warn(f"{path} could not be written ({error}); the outcome of the run stands")


def write_whole(path: Path, words: str) -> None:
    """Nobody ever reads half a report. What is no regular file (a pipe, a device) is written as it is."""
    if path.exists() and not path.is_file():
        path.write_text(words, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(words)
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
