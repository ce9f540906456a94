"""Helpers for tests of checkpoints, under the names of torch.testing._internal.distributed.checkpoint_utils."""

import typing as _typing

from torch_testing_ext._utils.checkpoints import *


def __getattr__(name: str) -> _typing.Any:
    """Import the names that need torch.distributed.checkpoint."""
    if name in ("Rot13Example", "get_test_extension_registry"):
        from torch_testing_ext._utils import checkpoint_extensions

        return getattr(checkpoint_extensions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
