"""Extensions of the storage of distributed checkpoints."""

from __future__ import annotations

from typing import Any


def stream_extension_class() -> Any:
    """Return the base of extensions that change the bytes. `StreamTransformExtension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    return StreamTransformExtension


def new_extension_registry() -> Any:
    """Return a table of extensions with those of torch. `torch.distributed.checkpoint._extension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    return ExtensionRegistry()
