"""Streams of fake accelerators. All work is done at once; if streams are late, those who do not wait never see it."""

import contextlib
from typing import Any

import torch

from .fake_devices import index_of
from .fake_library import accelerator, library


def set_late_streams(late: bool) -> None:
    """Let work that a stream has not waited for give wrong numbers there, as it may on hardware."""
    library.set_late_streams(late)


def _sleep(cycles: int) -> None:
    """Do nothing, where other devices keep the current stream busy: a late stream is late without."""


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device."""
    accelerator.synchronize(index_of(device))


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device."""
    stream: torch.Stream = accelerator.current_stream(index_of(device))
    return stream


def default_stream(device: Any = None) -> torch.Stream:
    """Return the default stream of a device."""
    stream: torch.Stream = library.default_stream(index_of(device))
    return stream


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device."""
    accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:
    """Return a context in which a stream is the current one; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream
