"""A process group that communicates with nobody: one process plays any rank of any world.

Its collectives return at once and their results mean nothing. For code that only needs a group to exist.
"""

import torch.distributed as dist

from torch_testing_ext import _torch

FakeProcessGroup = _torch.fake_process_group()


class FakeStore(dist.Store):
    """A store that keeps nothing, to hand to `init_process_group(backend="fake", store=FakeStore(), ...)`."""


_torch.register_fake_backend()
