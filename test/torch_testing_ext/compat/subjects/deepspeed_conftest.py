import os

import pytest

from torch_testing_ext.compat.deepspeed import DistributedFixture


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    assert not getattr(fixturedef.func, "is_dist_fixture", False)


class from_conftest(DistributedFixture):
    world_size = 2

    def run(self, tmpdir):
        tmpdir.join(f"rank{os.environ['RANK']}").write(os.environ["WORLD_SIZE"])
