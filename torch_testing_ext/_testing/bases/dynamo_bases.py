"""Bases for tests of the compiler over process groups; each test starts with empty compiler caches."""

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.bases.distributed_bases import DistributedTestBase
from torch_testing_ext._testing.bases.test_case import TestCase
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, TestSkip, most_needed
from torch_testing_ext._torch import compiler_state

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


_HashStore: Any = dist.HashStore  # type: ignore[attr-defined, unused-ignore]  # from C++


class DynamoDistributedSingleProcTestCase(TestCase):
    """Runs all tests of the class in this process, as a group of one rank; on the CPU if there is no accelerator."""

    rank: int
    device: str
    device_ids: list[int] | None
    _exit_stack: ExitStack

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._exit_stack = ExitStack()
        cls._exit_stack.enter_context(compiler_state.strict_dynamo())
        kind = accelerators.accelerator_type() or "cpu"
        cls.rank = 0
        cls.device = f"{kind}:{cls.rank}"
        cls.device_ids = None
        # A group of one needs no port.
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(backend, store=_HashStore(), rank=cls.rank, world_size=1)
        cls._exit_stack.callback(dist.destroy_process_group)

    @classmethod
    def tearDownClass(cls) -> None:
        cls._exit_stack.close()
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        compiler_state.forget_compiled()

    def tearDown(self) -> None:
        compiler_state.forget_compiled()
        super().tearDown()


class DynamoDistributedMultiProcTestCase(DistributedTestBase):
    """Runs a rank on every accelerator; a subclass that runs without accelerators sets `world_size`."""

    @property
    def world_size(self) -> int:
        return accelerators.ranks_for(most_needed([getattr(self, self._testMethodName, None)]))

    def _known_skip(self) -> TestSkip | None:
        return super()._known_skip() if int(self.world_size) else TEST_SKIPS["no_accelerator"]

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        compiler_state.forget_compiled()
        super()._run(rank, test_name, file_name, pipe, **kwargs)
