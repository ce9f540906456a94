"""DistributedTest and DistributedFixture: DeepSpeed's names, with our ranks behind them."""

from __future__ import annotations

import re

from kit.pytest_runs import PytestCase, PytestRun, run_pytest

from torch_testing_ext.common_utils import run_tests

HEAD = """
import os
import pytest, torch
import torch.distributed as dist
from torch_testing_ext.ranks import DistributedFixture, DistributedTest

def size():
    return int(os.environ["WORLD_SIZE"])
"""
# The conftest of a project that has always called such classes itself.
CONFTEST = """
import os
import pytest
from torch_testing_ext.ranks import DistributedFixture

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
"""
SUBJECT = (
    HEAD
    + """
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
"""
)
MODEL = {
    "TestDefault.test_group": ("passed", ""),
    "TestDefault.test_fails_in_one_rank": ("failed", "rank 1 of 2 failed"),
    "TestDefault.test_size_of_its_own": ("passed", ""),
    "TestDefault.test_sizes_of_its_own[world_size=1-3]": ("passed", ""),
    "TestDefault.test_sizes_of_its_own[world_size=2-3]": ("passed", ""),
    "TestDefault.test_size_as_an_argument[1]": ("passed", ""),
    "TestDefault.test_size_as_an_argument[2]": ("skipped", "unconditional skip"),
    "TestDefault.test_skips": ("skipped", "not here"),
    "TestDefault.test_xfails": ("xfail", ""),
    "TestDefault.test_fixture_of_the_class[5]": ("passed", ""),
    "TestList.test_size[world_size=1-purple]": ("passed", ""),
    "TestList.test_size[world_size=3-purple]": ("passed", ""),
    "TestWithoutGroup.test_env": ("passed", ""),
    "TestWithoutGroup.test_fresh_ranks": ("passed", ""),
    "TestWithoutEnv.test_group": ("passed", ""),
    "TestHangs.test_hangs": ("failed", "timed out after"),
    "TestNeedsAccelerators.test_never_here": ("skipped", "Need at least 99 accelerator devices"),
    "TestBackend.test_backend": ("passed", ""),
    "test_plain": ("passed", ""),
    "TestFixture.test_files[10-7]": ("passed", ""),
    "TestFixture.test_files[20-7]": ("passed", ""),
    "TestFixture.test_from_conftest": ("passed", ""),
    "TestFixture.test_fails": ("error", "rank 1 of 2 failed"),
    "TestFixture.test_skips": ("skipped", "by the fixture"),
}
REFUSED = {
    "zero": ("class TestX(DistributedTest):\n    world_size = 0\n    def test_x(self): ...", "the world size is 0"),
    "text": ("class TestX(DistributedTest):\n    world_size = '2'\n    def test_x(self): ...", "the world size is '2'"),
    "empty": (
        "class TestX(DistributedTest):\n    world_size = []\n    def test_x(self): ...",
        "list of world sizes is empty",
    ),
    "launch": (
        "class TestX(DistributedTest):\n    def _launch_procs(self, *args): ...\n    def test_x(self): ...",
        "TestX overrides _launch_procs, which is not called here",
    ),
    "run": (
        "class TestX(DistributedTest):\n    def run(self, **kwargs): ...\n    def test_x(self): ...",
        "TestX overrides run, which is not called here",
    ),
    "flag": (
        "class TestX(DistributedTest):\n    set_dist_env = 'no'\n    def test_x(self): ...",
        "TestX.set_dist_env is 'no'; it must be True or False",
    ),
    "backend": ("class TestX(DistributedTest):\n    backend = 1\n    def test_x(self): ...", "backend is 1"),
    "timeout": ("class TestX(DistributedTest):\n    exec_timeout = -1\n    def test_x(self): ...", "timeout is -1"),
    "argument": (
        "@pytest.fixture(params=[1])\ndef world_size(request): return 1\n"
        "class TestX(DistributedTest):\n    def test_x(self, world_size): ...",
        "its argument world_size is a fixture",
    ),
    "parameter": (
        "class TestX(DistributedTest):\n    @pytest.mark.parametrize('world_size', [0])\n"
        "    def test_x(self, world_size): ...",
        "the world size is 0",
    ),
    "fixture_size": (
        "class fix(DistributedFixture):\n    world_size = [1, 2]\n    def run(self): ...\ndef test_x(fix): ...",
        "its fixture fix: its world size is [1, 2]; it runs once",
    ),
    "fixture_none": (
        "class fix(DistributedFixture):\n    world_size = None\n    def run(self): ...\ndef test_x(fix): ...",
        "its fixture fix: the world size is None",
    ),
    "fixture_run": ("class fix(DistributedFixture): ...\ndef test_x(fix): ...", "it has no method `run`"),
    "fixture_launch": (
        "class fix(DistributedFixture):\n    def _dist_run(self): ...\n    def run(self): ...\ndef test_x(fix): ...",
        "fix overrides _dist_run",
    ),
    "fixture_in_ranks": (
        "class fix(DistributedFixture):\n    def run(self, dist_env): ...\n"
        "class TestX(DistributedTest):\n    def test_x(self, fix): ...",
        "its fixture 'fix' runs in ranks of its own and needs dist_env",
    ),
}


# In place of the package: what it makes is known as made by it, and a class or mark says otherwise.
OF_DEEPSPEED = (
    HEAD
    + """
import sys, types
deepspeed = types.ModuleType("deepspeed")
sys.modules["deepspeed"] = deepspeed

def init_distributed(dist_backend=None, *, timeout=0):
    dist.init_process_group(dist_backend or "gloo")
    deepspeed.has_made = dist_backend

deepspeed.init_distributed = init_distributed

class by_deepspeed(DistributedFixture):
    backend = "gloo"

    def run(self):
        assert deepspeed.has_made == "gloo"

class TestByDeepspeed(DistributedTest):
    def test_made(self, by_deepspeed):
        assert deepspeed.has_made is None and dist.get_world_size() == 2

@pytest.mark.world_size(2, scope="class")
class TestShared(DistributedTest):
    def test_first(self):
        deepspeed.is_shared = True

    def test_second(self):
        assert deepspeed.is_shared

class TestByItself(DistributedTest):
    init = staticmethod(lambda: dist.init_process_group("gloo"))

    def test_made(self):
        assert not hasattr(deepspeed, "has_made")
"""
)


class ExecClassesTest(PytestCase):
    run_of_subject: PytestRun

    @classmethod
    def setUpClass(cls) -> None:
        cls.run_of_subject = run_pytest({"test_subject.py": SUBJECT, "conftest.py": CONFTEST})

    def test_every_outcome(self) -> None:
        self.assertOutcomes(self.run_of_subject, {name: outcome for name, (outcome, _) in MODEL.items()})
        for name, (_, text) in MODEL.items():
            with self.subTest(test=name):
                self.assertIn(text, self.run_of_subject.messages[name].partition("\n")[0])

    def test_deepspeed_makes_the_groups(self) -> None:
        run = run_pytest({"test_x.py": OF_DEEPSPEED})
        shared = ("TestShared.test_first", "TestShared.test_second")
        names = ("TestByDeepspeed.test_made", *shared, "TestByItself.test_made")
        self.assertOutcomes(run, dict.fromkeys(names, "passed"))

    def test_a_fixture_that_fails_in_a_rank_is_named(self) -> None:
        message = self.run_of_subject.messages["TestFixture.test_fails"]
        self.assertIn("rank 1 of 2 failed", message)
        self.assertIn("fixture broken", message)
        self.assertIn("AssertionError: in the fixture", message)
        self.assertNotIn("torch_testing_ext/", message)

    def test_refused(self) -> None:
        head = "import pytest\nfrom torch_testing_ext.ranks import DistributedFixture, DistributedTest\n"
        run = run_pytest({f"test_{name}.py": f"{head}{body}\n" for name, (body, _) in REFUSED.items()})
        self.assertEqual(run.code, 1, run.text)
        for name, (_, text) in REFUSED.items():
            with self.subTest(name=name):
                found = re.search(rf"^test_{name}\.py::(?:TestX::)?test_x\S*: (.*)$", run.text, re.M)
                self.assertIsNotNone(found, run.text)
                assert found is not None
                self.assertIn(text, found.group(1))

    def test_without_the_plugin_nothing_passes(self) -> None:
        source = HEAD + "class TestX(DistributedTest):\n    init_distributed = False\n    def test_x(self): ...\n"
        run = run_pytest({"test_x.py": source}, plugin=("-p", "no:torch_testing_ext.pytest_plugin"))
        self.assertOutcomes(run, {"TestX.test_x": "error"})
        self.assertIn("TestX needs the plugin", run.messages["TestX.test_x"])


if __name__ == "__main__":
    run_tests()
