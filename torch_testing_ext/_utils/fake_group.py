"""A process group without communication: one process acts as any rank of a world of any size.

Its collectives return at once and their results mean nothing. Use it for code that only needs a group to exist.
"""

from typing import Any

import torch.distributed as dist

from torch_testing_ext import _torch

FakeProcessGroup = _torch.launch.fake_process_group()
_Store: Any = dist.Store  # type: ignore[attr-defined, unused-ignore]  # missing in the stubs of some versions


class FakeStore(_Store):  # type: ignore[misc, unused-ignore]
    """A store that keeps nothing, for `init_process_group(backend="fake", store=FakeStore(), ...)`."""


_torch.launch.register_fake_backend()
