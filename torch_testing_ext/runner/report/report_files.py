"""Writes the reports that are files: when the run is over, and each completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._process.whole_files import write_atomically

from ..events import Event, RunEnded
from .history import History, Recorder

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
            errors = [error for path, render in self.renderers.items() if (error := self._write(path, render, history))]
            if errors:
                raise errors[0]

    def _write(self, path: Path, render: Render, history: History) -> Exception | None:
        """Returns our own error, if any, so that the other reports are still written."""
        try:
            write_atomically(path, render(history))
        except OSError as error:
            self.warn(f"{path} could not be written ({error}); the outcome of the run is not affected")
        except Exception as error:
            self.warn(f"{path} could not be written: internal error: {type(error).__name__}: {error}")
            return error
        return None
