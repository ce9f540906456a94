"""DistributedTest and DistributedFixture: DeepSpeed's names, with our ranks behind them."""

from __future__ import annotations

import re

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, PytestRun, run_pytest

from torch_testing_ext.common_utils import run_tests

HEAD = """
import os
import pytest, torch
import torch.distributed as dist
from torch_testing_ext.compat.deepspeed import DistributedFixture, DistributedTest

def size():
    return int(os.environ["WORLD_SIZE"])
"""
# The conftest of a project that has always called such classes itself.
CONFTEST = subject(__file__, "deepspeed_conftest.py")
SUBJECT = subject(__file__, "deepspeed_classes.py")
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
        "TestX overrides _launch_procs, which is never called here",
    ),
    "run": (
        "class TestX(DistributedTest):\n    def run(self, **kwargs): ...\n    def test_x(self): ...",
        "TestX overrides run, which is never called here",
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
        "fixture fix: its world size is [1, 2]; it runs once",
    ),
    "fixture_none": (
        "class fix(DistributedFixture):\n    world_size = None\n    def run(self): ...\ndef test_x(fix): ...",
        "fixture fix: the world size is None",
    ),
    "fixture_run": ("class fix(DistributedFixture): ...\ndef test_x(fix): ...", "it has no method `run`"),
    "fixture_launch": (
        "class fix(DistributedFixture):\n    def _dist_run(self): ...\n    def run(self): ...\ndef test_x(fix): ...",
        "fix overrides _dist_run",
    ),
    "fixture_in_ranks": (
        "class fix(DistributedFixture):\n    def run(self, dist_env): ...\n"
        "class TestX(DistributedTest):\n    def test_x(self, fix): ...",
        "fixture 'fix' runs in ranks of its own, but needs dist_env",
    ),
}


# In place of the package: what it makes is known as made by it, and a class or mark says otherwise.
OF_DEEPSPEED = subject(__file__, "deepspeed_imported.py")


class DeepspeedTest(PytestCase):
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

    @pytest.mark.slow
    def test_refused(self) -> None:
        head = "import pytest\nfrom torch_testing_ext.compat.deepspeed import DistributedFixture, DistributedTest\n"
        run = run_pytest({f"test_{name}.py": f"{head}{body}\n" for name, (body, _) in REFUSED.items()})
        self.assertEqual(run.code, 1, run.text)
        for name, (_, text) in REFUSED.items():
            with self.subTest(name=name):
                found = re.search(rf"^(.*)\n\ntest_{name}\.py:\d+: test_x$", run.text, re.M)
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
