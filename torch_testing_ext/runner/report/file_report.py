"""The report that writes one file at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._process.files import write_atomically
from torch_testing_ext.runner.events import Event, RunEnded

from .recorder import History, Recorder

Render = Callable[[History], str]


@dataclass
class FileReport:
    """Records a run, and writes a file at its end. A file that cannot be written causes a warning."""

    path: Path
    render: Render
    warn: Callable[[str], None]
    _recorder: Recorder = field(default_factory=Recorder)

    def on_event(self, event: Event) -> None:
        self._recorder.on_event(event)
        if isinstance(event, RunEnded):
            self._write(self._recorder.history(event))

    def _write(self, history: History) -> None:
        try:
            write_atomically(self.path, self.render(history))
        except OSError as error:
            self.warn(f"{self.path} could not be written ({error}); the outcome of the run is not affected")
        except Exception as error:
            self.warn(f"{self.path} could not be written: internal error: {type(error).__name__}: {error}")
            raise
