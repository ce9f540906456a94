"""Small projects in the shapes that other people's have, each with tests that pass, fail and skip."""

# ruff: noqa: E501 - lines of the files of projects

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shape:
    """The files of a project."""

    files: Mapping[str, str]
    # Modules that must be installed.
    needs: tuple[str, ...] = ()
    # The folder in which the tests are run.
    run_in: str = "."
    environ: Mapping[str, str] = field(default_factory=dict)


FUNCTION = "def test_good(): pass\ndef test_bad(): assert 0\n"
CASE = (
    "import unittest\n"
    "class CaseTest(unittest.TestCase):\n"
    "    def test_good(self): pass\n"
    "    def test_bad(self): self.fail()\n"
    "    @unittest.skip('not now')\n"
    "    def test_skip(self): self.fail()\n"
    "    @unittest.expectedFailure\n"
    "    def test_expected(self): self.fail()\n"
)
USES_PACKAGE = "import pkg\ndef test_value(): assert pkg.VALUE == 1\n"
# Of plugins that warn where it is not set.
QUIET = "asyncio_default_fixture_loop_scope = function\n"


def _pytest_ini(*lines: str) -> str:
    return "\n".join(["[pytest]", *lines, ""])


def _pyproject(*lines: str) -> str:
    return "\n".join(["[tool.pytest.ini_options]", *lines, ""])


SHAPES = {
    # -- where files are
    "flat": Shape({"test_a.py": FUNCTION, "b_test.py": FUNCTION, "helper.py": "def test_no(): assert 0\n"}),
    "tests_folder": Shape({"tests/test_a.py": FUNCTION, "tests/deep/er/test_b.py": FUNCTION, "other/test_c.py": CASE}),
    "src_layout": Shape(
        {
            "src/pkg/__init__.py": "VALUE = 1\n",
            "tests/test_pkg.py": USES_PACKAGE + CASE,
            "pyproject.toml": _pyproject('pythonpath = ["src"]'),
        }
    ),
    "tests_in_package": Shape(
        {
            "pkg/__init__.py": "VALUE = 1\n",
            "pkg/tests/__init__.py": "",
            "pkg/tests/helper.py": "VALUE = 2\n",
            "pkg/tests/test_a.py": "from .. import VALUE\nfrom .helper import VALUE as TWO\n"
            "def test_a(): assert (VALUE, TWO) == (1, 2)\n",
            "pkg/tests/test_b.py": FUNCTION,
        }
    ),
    "namespace_package": Shape(
        {
            "space/one/__init__.py": "VALUE = 1\n",
            "space/two/tests/test_two.py": "from space.one import VALUE\ndef test_two(): assert VALUE == 1\n" + CASE,
            "pyproject.toml": _pyproject('pythonpath = ["."]', "consider_namespace_packages = true"),
        }
    ),
    "same_names_importlib": Shape(
        {
            "a/test_same.py": "def test_same(): pass\n",
            "b/test_same.py": FUNCTION,
            "pytest.ini": _pytest_ini("addopts = --import-mode=importlib"),
        }
    ),
    "same_names_prepend": Shape({"a/test_same.py": FUNCTION, "b/test_other.py": FUNCTION}),
    "monorepo": Shape(
        {
            "conftest.py": "import pytest\n@pytest.fixture\ndef root(): return 'root'\n",
            "one/conftest.py": "import pytest\n@pytest.fixture\ndef name(root): return root + '/one'\n",
            "one/tests/test_one.py": "def test_one(name): assert name == 'root/one'\n",
            "two/conftest.py": "import pytest\n@pytest.fixture\ndef name(root): return root + '/two'\n",
            "two/tests/test_two.py": "def test_two(name): assert name == 'root/two'\ndef test_bad(name): assert not name\n",
            "two/pytest.ini": _pytest_ini("python_files = nothing_*.py"),
        }
    ),
    "nested_settings": Shape(
        {
            "pytest.ini": _pytest_ini("python_functions = check_*"),
            "sub/tests/test_a.py": "def check_a(): assert 0\ndef test_a(): assert 0\n",
        },
        run_in="sub",
    ),
    "odd_folder_names": Shape(
        {"a b/c.d/test_a.py": FUNCTION, "build/test_b.py": FUNCTION, ".hidden/test_c.py": FUNCTION}
    ),
    # -- settings
    "pytest_ini": Shape(
        {"pytest.ini": _pytest_ini("testpaths = checks"), "checks/test_a.py": CASE, "test_b.py": FUNCTION}
    ),
    "empty_pytest_ini": Shape(
        {
            "pytest.ini": "",
            "pyproject.toml": _pyproject('testpaths = ["a"]'),
            "a/test_a.py": "def test_a(): pass\n",
            "b/test_b.py": FUNCTION,
        }
    ),
    "hidden_pytest_toml": Shape(
        {".pytest.toml": '[pytest]\npython_functions = ["it_*"]\n', "test_a.py": "def it_is(): assert 0\n" + FUNCTION}
    ),
    "tox_ini": Shape(
        {"tox.ini": _pytest_ini("python_files = check_*.py"), "check_a.py": FUNCTION, "test_b.py": FUNCTION}
    ),
    "setup_cfg": Shape(
        {"setup.cfg": "[tool:pytest]\nnorecursedirs = old\n", "old/test_a.py": FUNCTION, "new/test_b.py": FUNCTION}
    ),
    "names_of_tests": Shape(
        {
            "pyproject.toml": _pyproject('python_functions = ["it_*"]', 'python_classes = ["Check*"]'),
            "test_mix.py": CASE + "def it_fails(): assert 0\nclass CheckB:\n    def it_fails_too(self): assert 0\n",
            "test_only.py": "def it_only(): assert 0\ndef test_not(): assert 0\n",
        }
    ),
    "collect_ignore": Shape(
        {
            "conftest.py": "collect_ignore = ['test_no.py']\ncollect_ignore_glob = ['old_*']\n",
            "test_no.py": FUNCTION,
            "old_things/test_no.py": FUNCTION,
            "test_yes.py": FUNCTION,
        }
    ),
    "ignore_in_addopts": Shape(
        {
            "pytest.ini": _pytest_ini("addopts = --ignore=slow --deselect test_a.py::test_bad"),
            "slow/test_s.py": FUNCTION,
            "test_a.py": FUNCTION,
        }
    ),
    "addopts_with_a_path": Shape(
        {"pytest.ini": _pytest_ini("addopts = checks"), "checks/test_a.py": FUNCTION, "other/test_b.py": FUNCTION}
    ),
    "addopts_in_environment": Shape(
        {"test_a.py": FUNCTION + "def test_more(): pass\n"}, environ={"PYTEST_ADDOPTS": "-k 'good or bad'"}
    ),
    "marks_in_addopts": Shape(
        {
            "pytest.ini": _pytest_ini("addopts = -m 'not slow' --strict-markers", "markers = slow"),
            "test_a.py": "import pytest\n@pytest.mark.slow\ndef test_slow(): assert 0\n" + FUNCTION,
        }
    ),
    "unknown_mark": Shape(
        {
            "pytest.ini": _pytest_ini("addopts = --strict-markers"),
            "test_a.py": "import pytest\n@pytest.mark.slwo\ndef test_a(): pass\n",
            "test_b.py": "def test_b(): pass\n",
        }
    ),
    "warnings_are_errors": Shape(
        {
            "pytest.ini": _pytest_ini("filterwarnings = error", QUIET),
            "test_a.py": "import unittest, warnings\nclass T(unittest.TestCase):\n"
            "    def test_warns(self): warnings.warn('W')\n    def test_good(self): pass\n",
            "test_b.py": "import warnings\ndef test_warns(): warnings.warn('W')\n",
        }
    ),
    "xfail_strict": Shape(
        {
            "pytest.ini": _pytest_ini("xfail_strict = true"),
            "test_a.py": "import pytest\n@pytest.mark.xfail\ndef test_passes(): pass\n"
            "@pytest.mark.xfail\ndef test_fails(): assert 0\n"
            "@pytest.mark.xfail(strict=False)\ndef test_may_pass(): pass\n",
        }
    ),
    "usefixtures": Shape(
        {
            "pytest.ini": _pytest_ini("usefixtures = skips_bad"),
            "conftest.py": "import pytest\n@pytest.fixture\ndef skips_bad(request):\n"
            "    if 'bad' in request.node.name: pytest.skip('by the project')\n",
            "test_a.py": CASE + FUNCTION,
        }
    ),
    # -- conftest files
    "conftest_makes_things": Shape(
        {
            "conftest.py": "import os, sys\nos.environ['OF_CONFTEST'] = '1'\n"
            "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))\n",
            "lib/of_lib.py": "VALUE = 1\n",
            "tests/test_a.py": "import os, unittest, of_lib\nclass T(unittest.TestCase):\n"
            "    def test_a(self): self.assertEqual(os.environ['OF_CONFTEST'], '1')\n",
        }
    ),
    "conftest_only_skips": Shape(
        {
            "conftest.py": "import pytest\n@pytest.fixture(autouse=True)\ndef skip_all(): pytest.skip('never here')\n",
            "test_a.py": CASE,
            "test_b.py": FUNCTION,
        }
    ),
    "hooks_skip": Shape(
        {
            "conftest.py": "import pytest\n"
            "def pytest_collection_modifyitems(items):\n"
            "    for item in items:\n"
            "        if 'good' in item.name: item.add_marker(pytest.mark.skip(reason='by a hook'))\n"
            "def pytest_runtest_setup(item):\n"
            "    if 'bad' in item.name: pytest.skip('by another hook')\n",
            "test_a.py": CASE,
            "test_b.py": FUNCTION,
        }
    ),
    "conftest_is_broken": Shape(
        {
            "tests/test_a.py": FUNCTION,
            "other/conftest.py": "import there_is_no_such_module\n",
            "other/test_b.py": FUNCTION,
        }
    ),
    "own_option": Shape(
        {
            "conftest.py": "import pytest\ndef pytest_addoption(parser): parser.addoption('--fast', action='store_true')\n"
            "@pytest.fixture\ndef fast(request): return request.config.getoption('--fast')\n",
            "pytest.ini": _pytest_ini("addopts = --fast"),
            "test_a.py": "def test_fast(fast): assert fast\ndef test_slow(fast): assert not fast\n",
        }
    ),
    "pytest_plugins": Shape(
        {
            "conftest.py": "pytest_plugins = ['plugins_of_project.numbers']\n",
            "plugins_of_project/__init__.py": "",
            "plugins_of_project/numbers.py": "import pytest\n@pytest.fixture\ndef three(): return 3\n",
            "tests/test_a.py": "def test_three(three): assert three == 3\ndef test_two(three): assert three == 2\n",
            "pytest.ini": _pytest_ini("pythonpath = ."),
        }
    ),
    "sessions": Shape(
        {
            "conftest.py": "import pytest\ndef pytest_sessionstart(session): session.number = 7\n"
            "@pytest.fixture\ndef number(request): return request.session.number\n",
            "test_a.py": "def test_seven(number): assert number == 7\ndef test_six(number): assert number == 6\n",
        }
    ),
    # -- kinds of tests
    "unittest_only": Shape(
        {
            "test_a.py": CASE,
            "test_b.py": "import unittest\ndef setUpModule(): raise unittest.SkipTest('not here')\n" + CASE,
            "test_c.py": "import unittest\nclass C(unittest.TestCase):\n    @classmethod\n"
            "    def setUpClass(cls): raise ValueError\n    def test_c(self): pass\n"
            "class D(unittest.IsolatedAsyncioTestCase):\n    async def test_d(self): self.fail()\n"
            "class E(unittest.TestCase):\n    def runTest(self): self.fail()\n",
        }
    ),
    "load_tests": Shape(
        {
            "test_a.py": CASE + "def load_tests(loader, tests, pattern): return unittest.TestSuite()\n",
        }
    ),
    "mixed": Shape(
        {
            "test_a.py": CASE
            + FUNCTION
            + "class TestPlain:\n    def test_good(self): pass\n    class TestInner:\n        def test_bad(self): assert 0\n"
        }
    ),
    "generated": Shape(
        {
            "test_a.py": "import functools, unittest\nclass T(unittest.TestCase): pass\n"
            "for n in range(4): setattr(T, f'test_{n}', lambda self, n=n: self.assertLess(n, 3))\n"
            "def _check(n): assert n < 2\n"
            "for n in range(3): globals()[f'test_made_{n}'] = (lambda n: lambda: _check(n))(n)\n"
            "test_partial = functools.partial(_check, 5)\ntest_static = staticmethod(lambda: _check(1))\n"
            "def make(name):\n    class Made(unittest.TestCase):\n        def test_m(self): self.assertEqual(name, 'A')\n"
            "    return Made\nFirst, Second = make('A'), make('B')\n",
            "conftest.py": "def pytest_generate_tests(metafunc):\n"
            "    if 'number' in metafunc.fixturenames: metafunc.parametrize('number', [1, 2, 3])\n",
            "test_b.py": "def test_number(number): assert number != 2\n",
        }
    ),
    "parametrized": Shape(
        {
            "test_a.py": "import pytest\n@pytest.fixture(params=['x', 'y'], scope='module')\ndef letter(request):\n"
            "    return request.param\n@pytest.fixture(params=[1, 2])\ndef number(request): return request.param\n"
            "def test_both(letter, number): assert (letter, number) != ('y', 2)\n"
            "@pytest.mark.parametrize('text', ['a b', 'c::d', 'e/f', '\\u00e9', pytest.param('z', marks=pytest.mark.skip)])\n"
            "def test_text(text): assert text != 'e/f'\n"
        }
    ),
    "fixtures_of_all_scopes": Shape(
        {
            "conftest.py": "import pytest\nCALLS = []\n@pytest.fixture(scope='session')\ndef one():\n"
            "    CALLS.append(1)\n    yield len(CALLS)\n@pytest.fixture(scope='package')\ndef of_package(): return 1\n",
            "tests/__init__.py": "",
            "tests/test_a.py": "import pytest\n@pytest.fixture(scope='class')\ndef shared(): return []\nclass TestShared:\n"
            "    def test_1(self, shared, of_package): shared.append(1)\n    def test_2(self, shared): assert shared == [1]\n"
            "    def test_3(self, shared): assert not shared\n"
            "@pytest.fixture\ndef fails_late():\n    yield\n    raise ValueError\ndef test_late(fails_late, one): pass\n"
            "@pytest.fixture\ndef fails_early(): raise ValueError\ndef test_early(fails_early): pass\n",
        }
    ),
    "subtests": Shape(
        {
            "test_a.py": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
            "        for n in range(3):\n            with self.subTest(n=n): self.assertNotEqual(n, 1)\n"
            "    def test_b(self):\n        for n in range(3):\n            with self.subTest(n=n): pass\n"
        }
    ),
    "module_skips": Shape(
        {
            "test_a.py": "import pytest\npytest.importorskip('there_is_no_such_module')\ndef test_a(): assert 0\n",
            "test_b.py": "import unittest\nraise unittest.SkipTest('not here')\n",
            "test_c.py": FUNCTION,
        }
    ),
    "cannot_be_imported": Shape({"test_a.py": "import there_is_no_such_module\n", "test_b.py": "def test_b(): pass\n"}),
    "no_tests": Shape({"test_a.py": "VALUE = 1\n", "test_b.py": "def test_b(): pass\n"}),
    "doctest_modules": Shape(
        {
            "pytest.ini": _pytest_ini("addopts = --doctest-modules --doctest-glob=*.rst"),
            "pkg/__init__.py": "",
            "pkg/numbers.py": 'def one():\n    """\n    >>> one()\n    1\n    """\n    return 1\n'
            'def two():\n    """\n    >>> two()\n    3\n    """\n    return 2\ndef test_no(): assert 0\n',
            "pkg/test_numbers.py": FUNCTION,
            "guide.rst": ">>> 1 + 1\n3\n",
        }
    ),
    "custom_collector": Shape(
        {
            "conftest.py": "import pytest\ndef pytest_collect_file(parent, file_path):\n"
            "    if file_path.suffix == '.sums': return Sums.from_parent(parent, path=file_path)\n"
            "class Sums(pytest.File):\n    def collect(self):\n        for line in self.path.read_text().splitlines():\n"
            "            yield Sum.from_parent(self, name=line)\n"
            "class Sum(pytest.Item):\n    def runtest(self): assert eval(self.name)\n"
            "    def reportinfo(self): return self.path, 0, self.name\n",
            "test_all.sums": "1 + 1 == 2\n1 + 1 == 3\n",
            "test_a.py": FUNCTION,
        }
    ),
    "yaml_collector": Shape(
        {
            "conftest.py": "import pytest, yaml\ndef pytest_collect_file(parent, file_path):\n"
            "    if file_path.suffix == '.yaml' and file_path.name.startswith('test'):\n"
            "        return YamlFile.from_parent(parent, path=file_path)\n"
            "class YamlFile(pytest.File):\n    def collect(self):\n"
            "        for name, spec in sorted(yaml.safe_load(self.path.open()).items()):\n"
            "            yield YamlItem.from_parent(self, name=name, spec=spec)\n"
            "class YamlItem(pytest.Item):\n    def __init__(self, *, spec, **kwargs):\n"
            "        super().__init__(**kwargs)\n        self.spec = spec\n"
            "    def runtest(self):\n        for name, value in self.spec.items(): assert name == value\n"
            "    def reportinfo(self): return self.path, 0, self.name\n",
            "cases/test_simple.yaml": "good:\n  a: a\nbad:\n  a: b\n",
        },
        needs=("yaml",),
    ),
    # -- plugins
    "asyncio": Shape(
        {
            "pytest.ini": _pytest_ini("asyncio_mode = auto", QUIET),
            "test_a.py": "import asyncio, pytest\n@pytest.fixture\nasync def number():\n    await asyncio.sleep(0)\n    return 1\n"
            "async def test_one(number): assert number == 1\nasync def test_two(number): assert number == 2\n",
        },
        needs=("pytest_asyncio",),
    ),
    "timeout": Shape(
        {
            "pytest.ini": _pytest_ini("timeout = 2"),
            "test_a.py": "import time, unittest\nclass T(unittest.TestCase):\n    def test_hangs(self): time.sleep(60)\n"
            "def test_good(): pass\n",
        },
        needs=("pytest_timeout",),
    ),
    "randomly": Shape(
        {"test_a.py": CASE + FUNCTION + "import random\ndef test_seed(): assert 0 <= random.random() < 1\n"},
        needs=("pytest_randomly",),
    ),
    "mock": Shape(
        {
            "test_a.py": "import os\ndef test_mock(mocker):\n    mocker.patch('os.getcwd', return_value='x')\n"
            "    assert os.getcwd() == 'x'\ndef test_undone(): assert os.getcwd() == 'x'\n"
        },
        needs=("pytest_mock",),
    ),
    "hypothesis": Shape(
        {
            "test_a.py": "import unittest\nfrom hypothesis import given, strategies as st\n"
            "@given(st.integers())\ndef test_small(n): assert n < 1000\n"
            "class T(unittest.TestCase):\n    @given(st.text())\n    def test_text(self, text): assert isinstance(text, str)\n"
        },
        needs=("hypothesis",),
    ),
    "rerunfailures": Shape(
        {
            "pytest.ini": _pytest_ini("addopts = --reruns 1"),
            "test_a.py": "CALLS = []\ndef test_second():\n    CALLS.append(1)\n    assert len(CALLS) > 1\n" + FUNCTION,
        },
        needs=("pytest_rerunfailures",),
    ),
    "xdist_in_addopts": Shape(
        {"pytest.ini": _pytest_ini("addopts = -n 2 -q"), "test_a.py": CASE, "test_b.py": FUNCTION}, needs=("xdist",)
    ),
}
