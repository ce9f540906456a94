import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.traffic import TrafficError


def all_reduce():
    return dist.all_reduce(torch.ones(4), async_op=True)


def functional_all_reduce():
    return functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)


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
@pytest.mark.parametrize("reduce", [all_reduce, functional_all_reduce])
def test_unfinished(dist_env, traffic, reduce):
    weight = torch.ones(2, 2)
    said = r"nobody in it waits \(1 by all_reduce at test_x\.py:\d+ in \w*all_reduce\)"
    with pytest.warns(UserWarning, match=said) as told, traffic() as seen:
        left = reduce()
        weight @ weight
        dist.barrier()
    assert told[0].filename == __file__
    assert (seen.calls(), seen.bytes(), seen.calls(op="barrier")) == (2, 16, 1)
    with pytest.raises(TrafficError, match=said):
        seen.overlapped("world", "all_reduce")
    with traffic() as following:
        left.wait()
        dist.all_reduce(torch.ones(2))
    assert (following.calls(), following.bytes(), following.overlapped()) == (1, 8, 0)


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
