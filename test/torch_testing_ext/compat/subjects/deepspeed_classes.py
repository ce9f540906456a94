import os

import pytest
import torch.distributed as dist

from torch_testing_ext.compat.deepspeed import DistributedFixture, DistributedTest


def size():
    return int(os.environ["WORLD_SIZE"])


class TestDefault(DistributedTest):
    def test_group(self):
        assert dist.get_world_size() == size() == self.world_size == 2
        assert os.environ["LOCAL_SIZE"] == "2"

    def test_fails_in_one_rank(self):
        assert dist.get_rank() == 0

    @pytest.mark.world_size(1)
    def test_size_of_its_own(self):
        assert dist.get_world_size() == 1

    @pytest.mark.world_size([1, 2])
    @pytest.mark.parametrize("number", [3])
    def test_sizes_of_its_own(self, number):
        assert dist.get_world_size() in (1, 2) and number == 3

    @pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.skip)])
    def test_size_as_an_argument(self, world_size):
        assert dist.get_world_size() == world_size == 1

    def test_skips(self):
        pytest.skip("not here")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfails(self):
        raise ValueError

    @pytest.fixture(params=[5])
    def of_class(self, request):
        return request.param

    def test_fixture_of_the_class(self, of_class, default="default"):
        assert of_class == 5 and default == "default"


@pytest.mark.parametrize("color", ["purple"])
class TestList(DistributedTest):
    world_size = [1, 3]

    def test_size(self, color):
        assert dist.get_world_size() in self.world_size and color == "purple"


class TestWithoutGroup(DistributedTest):
    init_distributed = False
    reuse_dist_env = True
    non_daemonic_procs = True
    exec_timeout = 60

    def test_env(self):
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        assert dist.get_world_size() == 2

    def test_fresh_ranks(self):
        assert not dist.is_initialized()


class TestWithoutEnv(DistributedTest):
    world_size = 2
    set_dist_env = False

    def test_group(self):
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_SIZE"} & set(os.environ)
        assert dist.get_world_size() == 2


class TestHangs(DistributedTest):
    exec_timeout = 1

    def test_hangs(self):
        if dist.get_rank() == 0:
            dist.barrier()
            dist.barrier()
        else:
            dist.barrier()
            import threading

            threading.Event().wait()


class TestNeedsAccelerators(DistributedTest):
    requires_cuda_env = True
    world_size = 99

    def test_never_here(self):
        raise AssertionError("it runs")


class TestBackend(DistributedTest):
    backend = "cpu:gloo"

    def test_backend(self, dist_env):
        assert dist_env.backend == "cpu:gloo"


@pytest.fixture(params=[10, 20])
def value(request):
    return request.param


# Used before it is defined.
def test_plain(in_one_rank, tmp_path):
    assert (tmp_path / "written").read_text() == "1"
    assert not dist.is_initialized()


class in_one_rank(DistributedFixture):
    world_size = 1

    def run(self, tmp_path):
        (tmp_path / "written").write_text(str(dist.get_world_size()))


class _base(DistributedFixture):
    world_size = None

    def run(self, class_tmpdir, value, number, default=3):
        assert dist.get_world_size() == size() == self.world_size
        with open(os.path.join(class_tmpdir, f"{dist.get_rank()}.txt"), "w") as file:
            file.write(f"{size()},{value},{number},{default}")


class in_three_ranks(_base):
    world_size = 3


class in_two_ranks(_base):
    world_size = 2


class TestFixture(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("number", [7])
    def test_files(self, in_three_ranks, value, number, class_tmpdir):
        assert isinstance(in_three_ranks, DistributedFixture)
        assert dist.get_world_size() == 1
        for rank in range(3):
            with open(os.path.join(class_tmpdir, f"{rank}.txt")) as file:
                assert file.read() == f"3,{value},7,3"

    def test_from_conftest(self, from_conftest, tmpdir):
        assert [tmpdir.join(f"rank{rank}").read() for rank in range(2)] == ["2", "2"]

    def test_fails(self, broken):
        raise AssertionError("it runs")

    def test_skips(self, skipping):
        raise AssertionError("it runs")


class broken(DistributedFixture):
    def run(self):
        assert dist.get_rank() == 0, "in the fixture"


class skipping(DistributedFixture):
    def run(self):
        pytest.skip("by the fixture")
