"""Writes the reports that are files: when the run is over, and each completely or not at all."""

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
    """Records a run and writes all file reports at its end. A report that cannot be written causes a warning."""

    renderers: dict[Path, Render]
    warn: Callable[[str], None]
    _recorder: Recorder = field(default_factory=Recorder)

    def on_event(self, event: Event) -> None:
        self._recorder.on_event(event)
        if isinstance(event, RunEnded):
            history = self._recorder.history(event)
            for path, render in self.renderers.items():
                self._write(path, render, history)

    def _write(self, path: Path, render: Render, history: History) -> None:
        try:
            write_whole(path, render(history))
        except OSError as error:
            self.warn(f"{path} could not be written ({error}); the outcome of the run is not affected")


def write_whole(path: Path, content: str) -> None:
    """Replaces the file in one step, so that no reader sees half a report. Pipes and devices are written directly."""
    if path.exists() and not path.is_file():
        path.write_text(content, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
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
