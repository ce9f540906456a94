import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.traffic import TrafficError


@pytest.mark.world_size(1)
def test_asked_in_the_block(dist_env, traffic):
    with traffic() as seen, pytest.raises(TrafficError, match="has not ended"):
        seen.calls()


@pytest.mark.world_size(1)
def test_nested(dist_env, traffic):
    with traffic() as seen:
        with pytest.raises(TrafficError, match="cannot be nested"), traffic():
            pass
        dist.barrier()
    assert seen.calls() == 1


@pytest.mark.world_size(1)
def test_budgets(dist_env, traffic, tmp_path):
    with traffic() as seen:
        dist.all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="no group 'tp'; it is in the default group"):
        seen.calls("tp")
    file = tmp_path / "step.toml"
    with pytest.raises(ValueError, match="write it with --update-budgets"):
        seen.within(file)
    file.write_text("torch = ")
    with pytest.raises(ValueError, match="cannot be read"):
        seen.within(file)
    content = 'torch = "2.0"\nworld_size = {size}\n[[class]]\nranks = [0]\n'
    content += '[[class.issued]]\ngroup = "world"\nop = "all_reduce"\ncalls = {calls}\nbytes = 8\n'
    file.write_text(content.format(size=2, calls=1))
    with pytest.raises(ValueError, match="one of 2 ranks, and this world has 1"):
        seen.within(file)
    file.write_text(content.format(size=1, calls=2))
    with pytest.raises(AssertionError, match=r"made with torch 2\.0"):
        seen.within(file)
    file.write_text(content.format(size=1, calls=1))
    seen.within(file)
    with traffic() as nothing:
        pass
    with pytest.raises(ValueError, match="issues nothing"):
        nothing.within(file)


class ThreadsTest(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_threads(self):
        with self.assertRaisesRegex(TrafficError, "threads share"):
            self.traffic()
