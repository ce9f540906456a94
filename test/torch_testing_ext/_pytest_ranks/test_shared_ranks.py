"""Ranks that the tests of a class or module share, by `scope` in the mark."""

from __future__ import annotations

from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = """
import os, logging, unittest
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2, scope="module")
SEEN = []

@pytest.fixture(scope="module")
def model(dist_env):
    SEEN.append("model")
    yield torch.ones(1) * dist_env.rank
    print("model down")
    raise ValueError("at the end")

@pytest.fixture(scope="class")
def of_class(model):
    SEEN.append("class")
    yield
    SEEN.append("class down")

@pytest.fixture(autouse=True)
def each(ranks):
    yield
    SEEN.append("each down")

@pytest.mark.parametrize("n", [1, 2])
def test_a(model, n):
    SEEN.append(os.getpid())
    print("printed by a", n)
    logging.getLogger().warning("logged by a %d", n)
    dist.all_reduce(model)
    assert SEEN.count("model") == 1 and SEEN.count("each down") == n - 1

class TestC:
    def test_c(self, of_class, tmp_path):
        assert SEEN.count("class") == 1 and tmp_path.exists()
    def test_d(self, of_class):
        assert SEEN.count("class") == 1

def test_one_process(model):
    pids = {each for each in SEEN if isinstance(each, int)}
    assert pids == {os.getpid()} and SEEN.count("class down") == SEEN.count("model") == 1

def test_fails(model):
    assert dist.get_rank() == 0

def test_renewed(model):
    dist.all_reduce(model)
    assert SEEN == ["model"]

def test_dies():
    if os.environ["RANK"] == "1":
        os._exit(3)

@pytest.mark.parametrize("text", ["one", "zwölf"])
def test_of_each_its_own(text, caplog):
    print(text)
    logging.warning(text)
    assert caplog.messages == [text] and "test_of_each_its_own" in os.environ["PYTEST_CURRENT_TEST"]

@pytest.mark.skip(reason="not now")
def test_skipped(): ...

@pytest.mark.xfail(reason="known")
def test_expected():
    assert False

@pytest.mark.xfail(strict=True)
def test_strict(): ...

def test_skips_itself():
    pytest.skip("inside")

@pytest.mark.world_size(1)
def test_fresh():
    assert SEEN == []

class TestOfUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.number = 1
    def setUp(self):
        self.other = 2
    def test_u(self):
        assert self.number + self.other == 3 and os.environ["WORLD_SIZE"] == "2"
    def test_v(self):
        assert self.number + self.other == 3

def test_last(model): ...
"""
REFUSED = """
import pytest

@pytest.fixture(scope="module")
def group(dist_env): ...

@pytest.mark.world_size(2, scope="class")
def test_too_wide(group): ...

@pytest.mark.world_size(2, scope="session")
def test_unknown(): ...

@pytest.mark.world_size(2, scope="module", isolated=True)
def test_isolated(): ...
"""


class SharedRanksTest(PytestCase):
    def test_outcomes(self) -> None:
        # In a new interpreter, which decides by the locale how it encodes text.
        run = run_pytest({"test_x.py": SUBJECT}, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", cold=True)
        passed = ["test_a[1]", "test_a[2]", "TestC.test_c", "TestC.test_d", "test_one_process", "test_renewed"]
        passed += [
            "test_of_each_its_own[one]",
            r"test_of_each_its_own[zw\xf6lf]",
            "test_fresh",
            "TestOfUnittest.test_u",
            "TestOfUnittest.test_v",
        ]
        others = {"test_fails": "failed", "test_dies": "failed", "test_strict": "failed", "test_skipped": "skipped"}
        others |= {"test_skips_itself": "skipped", "test_expected": "xfail", "test_last": "error"}
        self.assertOutcomes(run, {**dict.fromkeys(passed, "passed"), **others})
        self.assertIn("at the end", run.messages["test_last"])
        for number in (1, 2):
            for text in (f"printed by a {number}", f"logged by a {number}"):
                self.assertEqual(run.outputs[f"test_a[{number}]"].count(text), 2, text)

    def test_refused(self) -> None:
        run = run_pytest({"test_x.py": REFUSED})
        self.assertOutcomes(run, dict.fromkeys(("test_too_wide", "test_unknown", "test_isolated"), "error"))
        wide = "only the ranks of one class have. Give the fixture the scope 'class', or the mark scope='module'"
        self.assertIn(wide, run.messages["test_too_wide"])
        self.assertIn("scope is 'session'; it must be one of function, class, module", run.messages["test_unknown"])
        self.assertIn("isolated=True has new ranks for each test", run.messages["test_isolated"])


if __name__ == "__main__":
    run_tests()
