"""A project with tests for pytest of every outcome, file by file; `test_pytest_items.py` has the model."""

CONFTEST = """
import logging, os, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")

@pytest.fixture(scope="session")
def server():
    yield os.getpid()

def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for item in items if "deselected" in item.name])
    items[:] = [item for item in items if "deselected" not in item.name]

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if "swallowed" in item.name:
        return True
    if "plugin_crashes" in item.name:
        raise LookupError("in a hook of the project")

def pytest_runtest_logreport(report):
    if "stops_the_session" in report.nodeid and report.when == "call":
        SESSIONS[0].shouldstop = "it has seen enough"
    if "fails_the_session" in report.nodeid and report.when == "call":
        SESSIONS[0].shouldfail = "it is bad enough"
    if "counts_a_failure" in report.nodeid and report.when == "call":
        SESSIONS[0].testsfailed += 1

SESSIONS = []

def pytest_collection_finish(session):
    SESSIONS[:] = [session]
"""

PLAIN = """
import asyncio, logging, os, sys, time, unittest
import pytest
from torch_testing_ext.common_utils import timeout

def test_passes(tmp_path, capsys, request):
    print("captured")
    assert capsys.readouterr().out == "captured\\n"
    assert "own_basetemp" not in str(tmp_path)

def test_fails():
    logging.warning("logged %d", 3)
    print("printed")
    found = [1, 2]
    assert found == [1, 3]

def test_raises(): raise LookupError("gone")
def test_sys_exit(): sys.exit(0)
def test_exits(): os._exit(0)
def test_pytest_exit(): pytest.exit("enough", returncode=0)
def test_interrupts(): raise KeyboardInterrupt
def test_pytest_fail(): pytest.fail("by hand")
def test_swallowed(): pass
def test_plugin_crashes(): pass
def test_stops_the_session(): pass
def test_fails_the_session(): pass
def test_counts_a_failure(): pass
def test_deselected(): raise AssertionError("it was run")
def test_closes_all(): os.closerange(3, 4096)
def test_warns():
    import warnings
    warnings.warn("made an error by pytest.ini")

@timeout(4)
def test_hangs(): time.sleep(1000)

@pytest.mark.parametrize("number", [1, 2, "a b::c/d"])
def test_param(number): assert number != 2

@pytest.mark.skip(reason="never")
def test_skip(): raise AssertionError("it was run")
@pytest.mark.skipif("True", reason="not if")
def test_skipif(): raise AssertionError("it was run")
def test_skips_itself(): pytest.skip("inside")
@pytest.mark.xfail(reason="known")
def test_xfail(): assert 0
@pytest.mark.xfail(raises=ZeroDivisionError)
def test_xfail_otherwise(): raise LookupError("not by zero")
@pytest.mark.xfail(strict=True, reason="known")
def test_xfail_strict(): pass
@pytest.mark.xfail(reason="known")
def test_xpass(): pass
@pytest.mark.xfail(run=False, reason="not even run")
def test_xfail_not_run(): os._exit(0)

@pytest.mark.slow
class TestSlow:
    def test_method(self): pass
    class TestInner:
        def test_inner(self): assert self.__class__.__name__ == "TestInner"

@pytest.fixture
def fails_late():
    yield
    raise ValueError("in a tear-down")
@pytest.fixture
def exits_late():
    yield
    os._exit(0)
@pytest.fixture
def fails_early(): raise ValueError("in a set-up")
@pytest.fixture
def skips(): pytest.skip("by a fixture")
@pytest.fixture(scope="session")
def hangs_late():
    yield
    wait()
def wait(): time.sleep(1000)

def test_fixture_fails_late(fails_late): pass
def test_fails_and_its_fixture(fails_late): assert False, "first"
def test_fixture_exits_late(exits_late): pass
def test_fixture_fails_early(fails_early): pass
def test_no_fixture(nothing_of_this_name): pass
def test_fixture_skips(skips): raise AssertionError("it was run")
@timeout(4)
def test_session_fixture_hangs_late(hangs_late): pass

def test_subtests(subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert number != 1
"""

# Units: each fixture is made once.
SHARED = """
import os, pytest

MADE = []

@pytest.fixture(scope="module")
def model():
    MADE.append("model")
    yield os.getpid()

@pytest.fixture(scope="module", params=["a", "b"])
def variant(request): return request.param

def test_model_1(model): pass
def test_model_2(model): assert (model, MADE) == (os.getpid(), ["model"])
def test_variant(variant): assert MADE == []
def test_server(server, model): assert model == server
def test_alone(tmp_path_factory): assert MADE == []

class TestClass:
    @classmethod
    def setup_class(cls): cls.seen = []
    def test_1(self): self.seen.append(1)
    def test_2(self): assert self.seen == [1]

@pytest.fixture(scope="class")
def of_class(): return os.getpid()

class TestA:
    def test_1(self, of_class): pass
    def test_2(self, of_class): assert of_class == os.getpid()
class TestB:
    def test_1(self, of_class): pass

@pytest.fixture(scope="class")
def shared(): yield
@pytest.fixture(scope="class")
def ends_badly():
    yield
    raise ValueError("the last one")

@pytest.mark.usefixtures("shared")
class TestDies:
    def test_1(self): pass
    def test_2(self): os._exit(0)
    def test_3(self): pass

@pytest.mark.usefixtures("ends_badly")
class TestEnd:
    def test_1(self): pass
    def test_2(self): pass
"""

RANKS = """
import os, time, unittest
import pytest, torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase

def leased():
    return os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"]

@pytest.mark.world_size(2, devices=2)
def test_sum(dist_env):
    print("rank", dist_env.rank, "has", leased())
    assert dist.get_world_size() == 2 and dist_env.device.type == "cpu"
    assert sorted(leased().split(",")) == ["0", "1"]

@pytest.mark.world_size([1, 2])
def test_sizes(dist_env):
    assert leased() == "" and dist_env.rank == 0

@pytest.mark.world_size(2, timeout=4)
def test_hangs(dist_env):
    if dist_env.rank: time.sleep(1000)

@pytest.mark.world_size(2, devices=3)
def test_wants_more(): raise AssertionError("it was run")

class UnittestTest(unittest.TestCase):
    def test_by_unittest(self):
        self.assertEqual(type(self._outcome.result).__name__, "ReportingResult")
    @pytest.mark.world_size(2)
    def test_in_ranks(self):
        self.assertEqual(os.environ["WORLD_SIZE"], "2")
    @pytest.mark.skip(reason="by a mark")
    def test_skip_of_pytest(self): raise AssertionError("it was run")
    @pytest.mark.xfail
    def test_xfail_of_pytest(self): self.fail()
    @pytest.mark.slow
    @unittest.expectedFailure
    def test_expected_to_fail(self): pass

@pytest.mark.slow
class RankedTest(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_of_ranked_case(self): self.assertEqual(self.rank, 0)

class FixtureTest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def prepare(self): self.prepared = True
    def test_fixture_of_pytest(self): self.assertTrue(self.prepared)
"""

BAD_MARK = """
import pytest, unittest
@pytest.mark.world_size(0)
def test_zero(): pass
def test_beside(): pass
class CaseTest(unittest.TestCase):
    def test_of_unittest(self): pass
"""

ONLY_UNITTEST = """
import sys, unittest
class OnlyTest(unittest.TestCase):
    def test_imports_no_pytest(self): self.assertFalse({"pytest", "_pytest"}.intersection(sys.modules))
"""

BASE = "class Base:\n    def test_inherited(self): pass\n"
# Nothing in it looks like pytest.
LATE = "from base_of_tests import Base\nclass TestLate(Base):\n    def test_late(self):\n        assert 1 == 2\n"

# A project with hooks for its sessions: the first worker that ends must not take the folder from the others.
SESSION_CONFTEST = """
import os, pathlib, shutil, tempfile, time

def pytest_sessionstart(session):
    session.folder = tempfile.mkdtemp()

def pytest_sessionfinish(session, exitstatus):
    shutil.rmtree(session.folder)
    names = [item.name for item in session.items]
    if len(names) > 2:
        return  # the session in which the tests are listed
    if "test_raises_at_the_end" in names: raise ValueError("at the end")
    if "test_exits_at_the_end" in names: os._exit(0)
    if "test_fails_at_the_end" in names: session.exitstatus = 1
    if "test_hangs_at_the_end" in names: time.sleep(1000)
"""
SESSION = """
import os, pytest
@pytest.mark.parametrize("name", ["a b::c/d[1]", "é"])
def test_param(name): pass
from torch_testing_ext.common_utils import timeout
def test_1(request): assert os.path.isdir(request.session.folder)
def test_2(request): assert os.path.isdir(request.session.folder)
def test_raises_at_the_end(): pass
def test_exits_at_the_end(): pass
def test_fails_at_the_end(): pass
@timeout(4)
def test_hangs_at_the_end(): pass
"""

WITH_A_THREAD = """
import threading, time
thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
thread.start()
def test_in_an_interpreter(tmp_path): assert thread.is_alive()
"""

SKIPS_ITSELF = "import pytest\npytest.importorskip('there_is_no_such_module')\ndef test_a(): pass\n"
BROKEN = "import there_is_no_such_module\ndef test_a(): pass\n"
BESIDE = "import unittest\ndef test_a(): pass\nclass CaseTest(unittest.TestCase):\n    def test_u(self): pass\n"

FILES = {
    "pytest.ini": (
        "[pytest]\naddopts = -ra -x -m 'not slow' --junitxml=own.xml --basetemp=own_basetemp --strict-markers "
        "-n 2 --dist loadfile -p no:asyncio test\nfilterwarnings = error\n"
    ),
    "test/conftest.py": CONFTEST,
    "test/test_plain.py": PLAIN,
    "test/test_shared.py": SHARED,
    "test/test_ranks.py": RANKS,
    "test/test_bad_mark.py": BAD_MARK,
    "test/test_only_unittest.py": ONLY_UNITTEST,
    "test/base_of_tests.py": BASE,
    "test/test_late.py": LATE,
    "test/session/conftest.py": SESSION_CONFTEST,
    "test/session/test_session.py": SESSION,
    "test/test_with_a_thread.py": WITH_A_THREAD,
    "test/test_skips_itself.py": SKIPS_ITSELF,
    "test/test_broken.py": BROKEN,
    "test/test_skips_wrongly.py": "import pytest\npytest.skip('outside')\ndef test_a(): pass\n",
    "test/usage/pytest.ini": "[pytest]\naddopts = --there-is-no-such-option\n",
    "test/usage/test_usage.py": BESIDE,
    "test/crash/conftest.py": "import there_is_no_such_module\n",
    "test/crash/test_crash.py": BESIDE,
    "test/hook/conftest.py": "def pytest_collection_modifyitems(items): raise LookupError('in a hook')\n",
    "test/hook/test_hook.py": BESIDE,
    "test/doctest/pytest.ini": "[pytest]\naddopts = --doctest-modules --import-mode=importlib\n",
    "test/doctest/test_doctest.py": 'def test_a():\n    """\n    >>> 1 + 1\n    3\n    """\n',
}
