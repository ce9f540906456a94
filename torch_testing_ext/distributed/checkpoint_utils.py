"""Helpers for tests of checkpoints, under the names of torch.testing._internal.distributed.checkpoint_utils."""

import typing as _typing

from torch_testing_ext._testing.helpers.checkpoint_decorators import (
    with_checkpoint_logging as with_checkpoint_logging,
    with_temp_dir as with_temp_dir,
)


def __getattr__(name: str) -> _typing.Any:
    """Import the names that need torch.distributed.checkpoint."""
    if name in ("Rot13Example", "get_test_extension_registry"):
        from torch_testing_ext._testing.sharded import rot13_extension

        return getattr(rot13_extension, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
