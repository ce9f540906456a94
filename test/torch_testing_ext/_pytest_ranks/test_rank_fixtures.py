"""Fixtures that know their rank, functions of a project that make the group, and launcher variables at collection."""

from __future__ import annotations

import re

from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = """
import os
import pytest
import torch.distributed as dist

@pytest.fixture(autouse=True)
def group(request):
    if request.node.get_closest_marker("world_size") and "without" not in request.node.name:
        assert request.getfixturevalue("dist_env").rank == int(os.environ["RANK"])
    yield

@pytest.fixture(autouse=True)
def number(ranks):
    return None if ranks is None else (ranks.rank, ranks.world_size, ranks.local_rank, ranks.device.type, ranks.devices)

@pytest.fixture
def projects_own(ranks):
    yield ranks

@pytest.mark.world_size(2)
def test_marked(number):
    rank = dist.get_rank()
    assert number == (rank, 2, rank, "cpu", 0)

@pytest.mark.world_size(2)
class TestWithout:
    def test_without_group(self, ranks):
        assert not dist.is_initialized() and ranks.world_size == 2

def test_unmarked(number, projects_own):
    assert number is None and projects_own is None

class TestOwnNames:
    @pytest.fixture
    def dist_env(self):
        return "the project's"

    @pytest.fixture
    def ranks(self):
        return os.getpid()

    @pytest.fixture
    def number(self): ...

    def test_unmarked(self, dist_env):
        assert dist_env == "the project's"

    @pytest.mark.world_size(2)
    def test_marked_without(self, ranks):
        assert ranks == os.getppid() or ranks != os.getpid()

class TestExtended:
    @pytest.fixture
    def dist_env(self, dist_env):
        return dist_env.rank

    @pytest.mark.world_size(2)
    def test_marked_without(self, dist_env):
        assert dist_env == dist.get_rank()

def init():
    dist.init_process_group("gloo")

def init_for(ranks):
    dist.init_process_group("gloo", rank=1 - ranks.rank)

@pytest.mark.world_size(2, init=init)
def test_init(dist_env):
    assert (dist_env.backend, dist_env.group.size(), dist_env.store) == ("gloo", 2, None)

@pytest.mark.world_size(2, init=init_for)
def test_init_with_the_rank(dist_env):
    assert dist.get_rank() == 1 - dist_env.rank

@pytest.mark.world_size(2, init=print)
def test_init_makes_none(dist_env): ...

@pytest.mark.world_size(2, init="gloo")
def test_bad_init(): ...

@pytest.mark.world_size(1025)
def test_too_many(): ...
"""
READS = """
import os
import pytest
SIZE = int(os.environ.get("WORLD_SIZE", 1))
COPIES = dict(os.environ), os.environ.copy(), "HOME" in os.environ

@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.world_size(2)
def test_rank(rank):
    assert os.environ["WORLD_SIZE"] == "2"

@pytest.mark.skipif("RANK" not in os.environ, reason="not launched")
def test_launched():
    assert "RANK" not in os.environ
"""


class RankFixturesTest(PytestCase):
    def test_every_outcome(self) -> None:
        run = run_pytest({"test_x.py": SUBJECT})
        failed = {
            "test_init_makes_none": ("failed", "print, the init of the mark, has made no process group"),
            "test_bad_init": ("error", "init is 'gloo'; it must be a function that makes the process group"),
            "test_too_many": ("error", "at most 1024 are possible: every rank is a process of this machine"),
        }
        for name, (outcome, text) in failed.items():
            self.assertEqual(run.outcomes.pop(name), outcome, run.text)
            self.assertIn(text, run.messages[name])
        passed = ["test_marked", "TestWithout.test_without_group", "test_unmarked", "TestOwnNames.test_unmarked"]
        passed += ["TestOwnNames.test_marked_without", "TestExtended.test_marked_without", "test_init"]
        self.assertOutcomes(run, dict.fromkeys([*passed, "test_init_with_the_rank"], "passed"))

    def test_launcher_variables_that_the_collection_reads(self) -> None:
        """One warning names the lines; a setting has values for the time of the collection."""
        files = {"conftest.py": "import os\nLOCAL = os.getenv('LOCAL_RANK')\n", "test_x.py": READS}
        alone = {"test_rank[0]": "passed", "test_launched": "skipped"}
        launched = {"test_rank[0]": "passed", "test_rank[1]": "passed", "test_rank[2]": "passed"}
        some = "conftest.py:2 (LOCAL_RANK), test_x.py:4 (WORLD_SIZE), test_x.py:12 (RANK)."
        # With a filter `error`, too: the warning is shown, and ends nothing.
        rows = (
            ("", alone, some),
            ("RANK WORLD_SIZE LOCAL_RANK", alone, ""),
            ("RANK=0 WORLD_SIZE=3", launched, "conftest.py:2 (LOCAL_RANK)."),
        )
        for setting, outcomes, shown in rows:
            with self.subTest(setting=setting):
                options = ("-p", "no:asyncio", "-W", "error::UserWarning", "-o", f"dist_collect_env={setting}")
                run = run_pytest(files, *options)
                self.assertOutcomes(run, {"test_launched": "passed", **outcomes})
                found = re.findall(r"LauncherVariablesWarning: .* only ranks have them: (.*?\.) Parameters", run.text)
                self.assertEqual(found, [shown] if shown else [], run.text)
        run = run_pytest(files, *options, "-n", "1", "--max-worker-restart=0")
        self.assertOutcomes(run, {"test_launched": "passed", **launched})  # xdist has no launcher
        unmarked = run_pytest({"test_x.py": "import os; os.environ.get('RANK')\ndef test_x(): ..."})
        self.assertNotIn("LauncherVariablesWarning", unmarked.text)


if __name__ == "__main__":
    run_tests()
