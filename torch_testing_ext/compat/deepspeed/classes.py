"""The base classes with DeepSpeed's names, as data: the number of ranks, and their set-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._tests.launcher_variables import RENDEZVOUS


class DistributedExec:
    """The common part of a test class and a fixture of ranks: the number of ranks, and their set-up."""

    world_size: ClassVar[Any] = 2
    # The backend of the process group: by default that of the accelerators, gloo without any.
    backend: ClassVar[str | None] = None
    # Whether the process group exists when the test begins.
    init_distributed: ClassVar[bool] = True
    # Makes the group; a static method. By default deepspeed.init_distributed where deepspeed is imported, otherwise
    # torch's init_process_group.
    init: ClassVar[Any] = None
    # Whether ranks have RANK, WORLD_SIZE and the like.
    set_dist_env: ClassVar[bool] = True
    # Skip without an accelerator for each rank. Otherwise ranks use the CPU where there is no accelerator.
    requires_cuda_env: ClassVar[bool] = False
    # The time limit in seconds; None for that of the run.
    exec_timeout: ClassVar[float | None] = None
    # These two change nothing: every test has fresh ranks, which may start processes.
    reuse_dist_env: ClassVar[bool] = False
    non_daemonic_procs: ClassVar[bool] = False


def environment_of(cls: type[DistributedExec], world_size: int) -> dict[str, str | None]:
    """The changes of the environment that a class asks for; None removes a variable."""
    return {"LOCAL_SIZE": str(world_size)} if cls.set_dist_env else dict.fromkeys(RENDEZVOUS)


class DistributedTest(DistributedExec):
    """Base of test classes for pytest whose methods run in `world_size` ranks: a number, or a list of them."""

    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def class_tmpdir(request: Any, tmpdir_factory: Any) -> Any:
        """One folder for all ranks of all tests of the class, and for the fixtures of ranks that they use."""
        if not hasattr(request.config.option, "rank_timeout"):
            name = request.cls.__name__
            pytest.fail(f"{name} needs the plugin of torch_testing_ext, which runs it in ranks", pytrace=False)
        return tmpdir_factory.mktemp(request.cls.__name__)

    @pytest.fixture(autouse=True)
    @staticmethod
    def _environment_of_rank(request: Any, ranks: Any) -> Iterator[None]:
        variables = {} if ranks is None else environment_of(request.cls, ranks.world_size)
        with changed_environment(**variables):
            yield

    def __call__(self, request: Any) -> None:
        """Run the current test, for a hook in a conftest that runs such classes by calling them."""
        request.node.runtest()


class DistributedFixture(DistributedExec):
    """Base of fixtures for pytest: `run(self, ...)` is called in ranks before a test that asks for its class by name.

    `run` may ask for other fixtures. Ranks pass results to the test in files, in `class_tmpdir` for example.
    """

    __test__ = False

    def run(self, *args: Any, **kwargs: Any) -> object:
        """Override this."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run`")
