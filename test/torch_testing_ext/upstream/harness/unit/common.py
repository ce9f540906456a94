"""DeepSpeed's way, in miniature: a pool for each test, and a class that its conftest calls."""

import inspect

import processes
import pytest
import torch.distributed as dist


class _Exec:
    world_size = 2

    def __call__(self, request):
        self._launch(self.world_size, self._arguments(request, self.run))

    def _arguments(self, request, function):
        return {name: request.getfixturevalue(name) for name in inspect.signature(function).parameters}

    def _launch(self, world_size, arguments):
        def rank_main(rank, port):
            processes.set_variables(rank, world_size, port)
            dist.init_process_group("gloo")
            self.run(**arguments)
            dist.destroy_process_group()

        processes.run(world_size, rank_main)


class DistributedFixture(_Exec):
    is_dist_fixture = True


class DistributedTest(_Exec):
    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def class_tmpdir(request, tmpdir_factory):
        return tmpdir_factory.mktemp(request.cls.__name__)

    def __call__(self, request):
        self.run = getattr(self, request.function.__name__)
        sizes = [mark.args[0] for mark in request.node.own_markers if mark.name == "world_size"]
        self._launch(sizes[0] if sizes else self.world_size, self._arguments(request, self.run))


def as_fixture(cls):
    """Newer versions of pytest do not take a class for a fixture, as DeepSpeed has it."""

    def fixture(request):
        cls()(request)

    return pytest.fixture(name=cls.__name__)(fixture)


class Hooks:
    """Those of DeepSpeed's conftest."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        if getattr(item.cls, "is_dist_test", False):
            item.cls()(item._request)
            item.runtest = lambda: True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        if getattr(obj, "is_dist_fixture", False) and obj is not DistributedFixture:
            holder = type(collector.obj)("holder")
            setattr(holder, name, as_fixture(obj))
            collector.session._fixturemanager.parsefactories(holder=holder, node=collector)


def pytest_configure(config):
    config.pluginmanager.register(Hooks())
    config.addinivalue_line("markers", "world_size: the number of ranks of one test")
