"""A process group without communication, under the names of torch.testing._internal.distributed.fake_pg."""

from torch_testing_ext._testing.bases.groups_and_devices import (
    FakeProcessGroup as FakeProcessGroup,
    FakeStore as FakeStore,
)
