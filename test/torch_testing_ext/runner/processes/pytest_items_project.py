"""A project with tests for pytest of every outcome, file by file; `test_pytest_items.py` has the model."""

from kit.files import subject

CONFTEST = subject(__file__, "pytest_items/project_conftest.py")

PLAIN = subject(__file__, "pytest_items/plain.py")

# Units: each fixture is made once.
SHARED = subject(__file__, "pytest_items/shared.py")
SHARED_RANKS = subject(__file__, "pytest_items/shared_ranks.py")

RANKS = subject(__file__, "pytest_items/ranks.py")

BAD_MARK = """
import pytest, unittest
@pytest.mark.world_size(0)
def test_zero(): pass
def test_beside(): pass
class CaseTest(unittest.TestCase):
    def test_of_unittest(self): pass
"""

BASE = "class Base:\n    def test_inherited(self): pass\n"
# Nothing in it looks like pytest.
LATE = "from base_of_tests import Base\nclass TestLate(Base):\n    def test_late(self):\n        assert 1 == 2\n"

# A project with hooks for its sessions: the first worker that ends must not take the folder from the others.
SESSION_CONFTEST = subject(__file__, "pytest_items/session_conftest.py")
SESSION = subject(__file__, "pytest_items/session.py")

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
    "test/test_shared_ranks.py": SHARED_RANKS,
    "test/test_ranks.py": RANKS,
    "test/test_bad_mark.py": BAD_MARK,
    "test/base_of_tests.py": BASE,
    "test/test_late.py": LATE,
    "test/session/conftest.py": SESSION_CONFTEST,
    "test/session/test_session.py": SESSION,
    "test/test_with_a_thread.py": WITH_A_THREAD,
    "test/test_skips_itself.py": SKIPS_ITSELF,
    "test/test_broken.py": BROKEN,
    "test/test_skips_wrongly.py": "import pytest\npytest.skip('outside')\ndef test_a(): pass\n",
    "test/crash/conftest.py": "import there_is_no_such_module\n",
    "test/crash/test_crash.py": BESIDE,
    "test/hook/conftest.py": "def pytest_collection_modifyitems(items): raise LookupError('in a hook')\n",
    "test/hook/test_hook.py": BESIDE,
    "test/streams/conftest.py": "import sys\nsys.stdout = None\n",
    "test/streams/test_streams.py": "import sys\nsys.stderr = None\n" + BESIDE,
}
