"""A process group without communication, under the names of torch.testing._internal.distributed.fake_pg."""

from torch_testing_ext._testing.bases.fake_groups import FakeProcessGroup as FakeProcessGroup, FakeStore as FakeStore
