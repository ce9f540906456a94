"""The census: each planted hole has the right reason, and no test that ran is one."""

import contextlib
import io
import json
import tempfile
import textwrap
import unittest
from datetime import date
from pathlib import Path

from kit.invented_runs import finished_in_world
from kit.run_files import id_of, junit, passed, run_file, skipped

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.cli import main
from torch_testing_ext.runner.model import FinishedTest, Test
from torch_testing_ext.runner.run_files.census import HoleReason, take_census
from torch_testing_ext.runner.run_files.census_text import census_lines
from torch_testing_ext.runner.run_files.ci_jobs import read_ci_jobs
from torch_testing_ext.runner.run_files.definitions import find_definitions
from torch_testing_ext.runner.run_files.known_holes import read_known_holes
from torch_testing_ext.runner.run_files.reading import read_results


class CensusTestCase(unittest.TestCase):
    """A project with files of its own, and results of them."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.results = []

    def write(self, name, text):
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def ran(self, *finished, **more):
        self.results.append(run_file(self.root / f"run{len(self.results)}.ttx", finished, **more))

    def junit(self, *cases, **more):
        self.results.append(junit(self.root / f"run{len(self.results)}.xml", cases, **more))

    def census(self, **more):
        read = [results for path in self.results for results in read_results(path)]
        places = [self.root / "tests"]
        return take_census(find_definitions(self.root, places), read, jobs=read_ci_jobs(self.root, places), **more)

    def holes(self, **more):
        return {hole.test.removeprefix("tests/"): hole for hole in self.census(**more).holes}

    def assertHole(self, test, reason, detail, **more):
        """The only hole is this test, for this reason."""
        holes = self.holes(**more)
        self.assertEqual(list(holes), [test], holes)
        hole = holes[test]
        self.assertIs(hole.reason, reason, hole)
        self.assertRegex(hole.detail, detail)
        self.assertGreater(hole.line, 0)
        return hole


class PlantedHoleTest(CensusTestCase):
    """One hole each, beside a test that ran."""

    def setUp(self):
        super().setUp()
        self.write("tests/test_a.py", "def test_ran(): pass\n")
        self.ran(passed("tests/test_a.py::test_ran"))

    def add(self, text):
        self.write("tests/test_a.py", f"def test_ran(): pass\n{textwrap.dedent(text)}")

    def test_a_file_that_no_pattern_matches(self):
        self.write("tests/checks.py", "def test_x(): pass")
        self.assertHole("checks.py::test_x", HoleReason.NEVER_COLLECTED, "no pattern of python_files.*test_[*].py")

    def test_a_pattern_of_the_settings(self):
        self.write("pytest.ini", "[pytest]\npython_files = test_*.py checks.py")
        self.write("tests/checks.py", "def test_x(): pass")
        self.assertHole("checks.py::test_x", HoleReason.NEVER_COLLECTED, "no results have a test of this file")

    def test_a_module_for_tests_is_none(self):
        self.write("tests/helping.py", "def test_name(test): return test")
        self.add("from helping import test_name as name")
        self.assertEqual(self.holes(), {})

    def test_a_folder_outside_every_job(self):
        self.write("tests/outside/test_b.py", "def test_x(): pass")
        self.assertHole("outside/test_b.py::test_x", HoleReason.NEVER_COLLECTED, "nor of its folder tests/outside$")

    def test_a_path_filter_that_names_a_removed_folder(self):
        self.write("tests/new/test_b.py", "def test_x(): pass")
        self.write(".github/workflows/ci.yml", "on:\n  push:\n    paths: ['tests/old/**', 'tests/test_a.py']\n")
        detail = "nor of its folder tests/new; .github/workflows/ci.yml:3 names tests/old, which does not exist$"
        self.assertHole("new/test_b.py::test_x", HoleReason.NEVER_COLLECTED, detail)

    def test_a_file_that_no_command_of_ci_names(self):
        self.write("tests/new/test_b.py", "def test_x(): pass")
        self.write(".github/workflows/ci.yml", "jobs:\n  a:\n    steps:\n    - run: pytest tests/test_a.py\n")
        detail = "nor of its folder tests/new; no command of CI names it$"
        self.assertHole("new/test_b.py::test_x", HoleReason.NEVER_COLLECTED, detail)
        self.results.clear()
        self.assertHole("new/test_b.py::test_x", HoleReason.NEVER_COLLECTED, "^no command of CI names its file$")

    def test_ci_that_calls_scripts_is_no_witness(self):
        for name in "bcd":
            self.write(f"tests/test_{name}.py", "def test_x(): pass")
        self.write(".github/workflows/ci.yml", "- run: bash run_the_tests.sh\n- run: pytest tests/test_b.py\n")
        self.results.clear()
        census = self.census()
        self.assertEqual(census.holes, ())
        self.assertIn("names 1 of 4 files with tests itself", census.warnings[0])

    def test_without_results_or_commands_only_the_source_counts(self):
        self.results.clear()
        self.assertEqual(self.holes(), {})
        self.add("class TestX:\n    def test_x(self): pass\n    def test_x(self): print()")
        self.assertHole("test_a.py::TestX::test_x", HoleReason.NEVER_COLLECTED, "shadows it")

    def test_left_out_by_an_expression(self):
        for why in ("-k 'not slow'", "-m 'not gpu'"):
            with self.subTest(why):
                self.add("def test_slow(): pass")
                self.ran(left_out=[("tests/test_a.py::test_slow", why)])
                self.assertHole("test_a.py::test_slow", HoleReason.NOT_SELECTED, f"{why}$")

    def test_a_file_that_is_not_named(self):
        self.write("tests/test_b.py", "def test_x(): pass")
        self.ran(left_out=[("tests/test_b.py", "by name tests/test_a.py")])
        self.assertHole("test_b.py::test_x", HoleReason.NOT_SELECTED, "^by name tests/test_a.py$")

    def test_more_devices_than_any_machine_has(self):
        self.add("@needs(4)\ndef test_large(): pass")
        for host in "ab":
            self.ran(
                skipped("tests/test_a.py::test_large", "needs 4 devices, 2 available", want="4 devices"), host=host
            )
        hole = self.assertHole("test_a.py::test_large", HoleReason.NEED, "^needs 4 devices$")
        self.assertEqual(hole.line, 3)

    def test_a_world_size_that_no_job_has(self):
        self.add("def test_world(): pass")
        self.ran(skipped("tests/test_a.py::test_world", "requires a world size of 8, this one has 2"))
        self.assertHole("test_a.py::test_world", HoleReason.NEED, "world size of 8")

    def test_a_skip_by_hand_has_its_line(self):
        self.add(
            """\
            def test_pair():
                if device_count() < 2:
                    pytest.skip("needs 2 GPUs")
            """
        )
        self.ran(skipped("tests/test_a.py::test_pair", "needs 2 GPUs"))
        self.assertHole("test_a.py::test_pair", HoleReason.BY_HAND, "^tests/test_a.py:4: needs 2 GPUs$")

    def test_a_mark_that_skips_has_its_line(self):
        self.add("@pytest.mark.skipif(no_gpu, reason='no GPU')\ndef test_marked(): pass")
        self.ran(skipped("tests/test_a.py::test_marked", "no GPU"))
        self.assertHole("test_a.py::test_marked", HoleReason.BY_HAND, "^tests/test_a.py:2: no GPU$")

    def test_a_package_that_no_image_has(self):
        self.write("tests/test_b.py", "import pytest\nx = pytest.importorskip('x')\ndef test_x(): pass")
        self.ran(skipped("tests/test_b.py", "could not import 'x'"))
        self.assertHole("test_b.py::test_x", HoleReason.AT_IMPORT, "^tests/test_b.py:2: could not import 'x'$")

    def test_a_file_that_cannot_be_imported(self):
        self.write("tests/test_b.py", "import nowhere\ndef test_x(): pass")
        self.ran(passed("tests/test_b.py", outcome=TestOutcome.ERROR, message="ModuleNotFoundError: nowhere"))
        self.assertHole("test_b.py::test_x", HoleReason.NEVER_COLLECTED, "cannot be imported: ModuleNotFoundError")

    def test_one_parameter_of_ten(self):
        self.add("@pytest.mark.parametrize('x', range(10))\ndef test_p(x): pass")
        self.ran(*(passed(f"tests/test_a.py::test_p[{x}]") for x in range(10) if x != 7))
        self.assertHole("test_a.py::test_p[7]", HoleReason.NOT_SELECTED, "other parameters")

    def test_parameters_of_two_marks(self):
        self.add(
            "@pytest.mark.parametrize('x', [1, 2])\n@pytest.mark.parametrize('y', ['a', 'b'])\ndef test_p(x, y): 0"
        )
        self.ran(*(passed(f"tests/test_a.py::test_p[{y}-{x}]") for x in (1, 2) for y in "ab" if (x, y) != (2, "a")))
        self.assertHole("test_a.py::test_p[a-2]", HoleReason.NOT_SELECTED, "other parameters")

    def test_a_run_that_stopped_at_its_first_failure(self):
        self.add("def test_later(): pass")
        self.ran(unfinished=["tests/test_a.py::test_later"], stopped="1 failure (--maxfail 1)")
        self.assertHole("test_a.py::test_later", HoleReason.NOT_SELECTED, "stopped first: 1 failure")

    def test_a_class_with_an_init(self):
        self.add("class TestX:\n    def __init__(self): pass\n    def test_x(self): pass")
        self.assertHole("test_a.py::TestX::test_x", HoleReason.NEVER_COLLECTED, "it has __init__, at line 3$")

    def test_a_class_that_no_pattern_matches(self):
        self.add("class CheckX:\n    def test_x(self): pass")
        self.assertHole("test_a.py::CheckX::test_x", HoleReason.NEVER_COLLECTED, "python_classes matches CheckX$")

    def test_a_class_of_unittest_by_a_base_in_between(self):
        """It is collected, whatever its name: its tests are holes because no results have them."""
        self.write("tests/base.py", "class Base(unittest.TestCase): pass\nclass TestCase: pass")
        self.add("class Far(Base):\n    def test_x(self): pass")
        self.assertHole("test_a.py::Far::test_x", HoleReason.NOT_SELECTED, "no results have it")

    def test_a_class_from_elsewhere_that_is_not_for_tests(self):
        self.add(
            "class Model(LightningModule):\n    def test_step(self): pass\nclass Sub(Model):\n    def test_x(self): 0"
        )
        self.assertEqual(self.holes(), {})

    def test_a_class_within_one_that_is_not_collected(self):
        self.add("class CheckX:\n    class TestY:\n        def test_x(self): pass")
        self.assertHole(
            "test_a.py::CheckX::TestY::test_x", HoleReason.NEVER_COLLECTED, "python_classes matches CheckX$"
        )

    def test_classes_of_one_name_in_two_files(self):
        self.write("tests/test_b.py", "class TestX:\n    def test_b(self): pass")
        self.add("class TestX:\n    def __init__(self): pass\n    def test_x(self): pass")
        self.ran(passed("tests/test_b.py::TestX::test_b"))
        self.assertHole("test_a.py::TestX::test_x", HoleReason.NEVER_COLLECTED, "it has __init__, at line 3$")

    def test_inherited_tests_run_where_they_are_inherited(self):
        self.add("class Shared:\n    def test_x(self): pass\nclass TestReal(Shared):\n    pass")
        self.ran(passed("tests/test_a.py::TestReal::test_x"))
        self.assertEqual(self.holes(), {})

    def test_a_class_that_inherits_from_one_of_its_name(self):
        self.write("tests/base.py", "class TestX:\n    def test_x(self): pass")
        self.add("import base\nclass TestX(base.TestX):\n    pass")
        self.ran(passed("tests/test_a.py::TestX::test_x"))
        self.assertEqual(self.holes(), {})

    def test_a_shadowed_method(self):
        self.add("class TestX:\n    def test_x(self): pass\n    def test_x(self): print()")
        self.ran(passed("tests/test_a.py::TestX::test_x"))
        hole = self.assertHole("test_a.py::TestX::test_x", HoleReason.NEVER_COLLECTED, "shadows it, at line 4$")
        self.assertEqual(hole.line, 3)

    def test_a_definition_for_each_condition_is_none(self):
        self.add("if x:\n    def test_x(): pass\nelse:\n    def test_x(): print()")
        self.ran(passed("tests/test_a.py::test_x"))
        self.assertNotIn("shadows", str(self.holes()))

    def test_a_folder_that_a_conftest_ignores(self):
        self.write("tests/conftest.py", "collect_ignore = [\n    'old',\n]")
        self.write("tests/old/test_b.py", "def test_x(): pass")
        self.assertHole("old/test_b.py::test_x", HoleReason.NEVER_COLLECTED, "^tests/conftest.py:2 ignores it$")

    def test_a_shard_that_is_missing(self):
        self.add("def test_third(): pass")
        for part in ("1/3", "2/3"):
            self.ran(left_out=[("tests/test_a.py::test_third", f"--shard {part}")], shard=part)
        self.assertHole("test_a.py::test_third", HoleReason.NOT_SELECTED, "^shard 3/3 is not among the results$")

    def test_a_shard_that_is_torn(self):
        self.add("def test_third(): pass")
        self.ran(left_out=[("tests/test_a.py::test_third", "--shard 1/2")], shard="1/2")
        detail = "^shard 2/2 is not among the results; second.ttx is torn$"
        self.assertHole("test_a.py::test_third", HoleReason.NOT_SELECTED, detail, torn=["second.ttx"])

    def test_an_expected_failure_that_does_not_run(self):
        self.add("@pytest.mark.xfail(run=False)\ndef test_x(): pass")
        for number, message in enumerate(("[NOTRUN] broken", "reason: [NOTRUN] broken")):
            outcome = (TestOutcome.EXPECTED_FAILURE, TestOutcome.SKIPPED)[number]
            self.ran(passed("tests/test_a.py::test_x", outcome=outcome, message=message))
        self.assertHole("test_a.py::test_x", HoleReason.NOT_JUDGED, r"^xfail\(run=False\)$")

    def test_green_only_by_retries(self):
        self.add("def test_x(): pass")
        for number in range(20):
            self.ran(passed("tests/test_a.py::test_x", outcome=TestOutcome.FLAKY), clock=1e9 + number)
        self.assertHole("test_a.py::test_x", HoleReason.RETRIES, "in 20 runs$")
        self.ran(passed("tests/test_a.py::test_x"))
        self.assertEqual(self.holes(), {})

    def test_only_with_fake_devices(self):
        self.add("def test_x(): pass")
        self.ran(passed("tests/test_a.py::test_x", devices=2), fake=True)
        self.assertHole("test_a.py::test_x", HoleReason.MADE_UP, "only on fake devices$")

    def test_only_as_a_world(self):
        self.add("def test_x(): pass")
        test = Test(id_of("tests/test_a.py::test_x"))
        (attempt,) = finished_in_world(64).attempts
        self.ran(FinishedTest((type(attempt)(test, attempt.end),)))
        self.assertHole("test_a.py::test_x", HoleReason.MADE_UP, "as a world of 64 ranks")

    def test_a_renamed_test(self):
        self.add("def test_old_name(): assert compute() == 4")
        self.ran(passed("tests/test_a.py::test_old_name"), root=self.root)
        self.add("def test_new_name(): assert compute() == 4")
        self.assertHole("test_a.py::test_new_name", HoleReason.RENAMED, "^ran as tests/test_a.py::test_old_name;")

    def test_known_holes_until_their_day(self):
        self.add("def test_x(): pass\ndef test_y(): pass")
        self.write("holes.txt", "# why\n2026-06-30  tests/test_a.py::test_x  no machine yet\n")
        known = read_known_holes(self.root / "holes.txt")
        census = self.census(known=known, today=date(2026, 6, 30))
        self.assertEqual((census.new_holes, len(census.holes)), (1, 2))
        census = self.census(known=known, today=date(2026, 7, 1))
        self.assertEqual(census.new_holes, 2)
        self.assertIn("(known until 2026-06-30, which is over: no machine yet)", "\n".join(census_lines(census)))

    def test_names_without_parameters_are_unknown_never_run(self):
        self.add("@pytest.mark.parametrize('x', values())\ndef test_p(x): pass")
        self.junit(("tests.test_a", "test_p", ""), ("tests.test_a", "test_p", ""))
        self.assertHole("test_a.py::test_p", HoleReason.UNKNOWN, "^2 results without parameters")

    def test_collected_by_a_list(self):
        self.write("tests/test_b.py", "def test_x(): pass")
        collected = [id_of("tests/test_b.py::test_x")]
        self.assertHole("test_b.py::test_x", HoleReason.NOT_SELECTED, "a collection lists it", collected=collected)

    def test_a_failure_counts_as_seen(self):
        self.add("def test_x(): pass")
        self.ran(passed("tests/test_a.py::test_x", outcome=TestOutcome.FAILED))
        self.assertEqual(self.holes(), {})


class OtherRunnersTest(CensusTestCase):
    """Names in the forms of other runners."""

    def setUp(self):
        super().setUp()
        self.write("tests/sub/test_a.py", "class TestA(TestCase):\n    def test_x(self): pass\n\n\ndef test_y(): pass")

    def test_names(self):
        for cls_of_x, cls_of_y in (
            ("tests.sub.test_a.TestA", "tests.sub.test_a"),
            ("sub.test_a.TestA", "sub.test_a"),
            ("test_a.TestA", "test_a"),
            ("project.tests.sub.test_a.TestA", "project.tests.sub.test_a"),
        ):
            with self.subTest(cls_of_x):
                self.results.clear()
                self.junit((cls_of_x, "test_x", ""), (cls_of_y, "test_y", ""))
                self.assertEqual(self.holes(), {})

    def test_the_class_alone_and_the_file_of_the_suite(self):
        self.junit(("TestA", "test_x", ""), suite="file='/somewhere/tests/sub/test_a.py'")
        self.assertEqual(list(self.holes()), ["sub/test_a.py::test_y"])

    def test_tests_that_decorators_make(self):
        self.write("tests/sub/test_a.py", "class TestA(TestCase):\n    def test_x(self, device): pass")
        self.junit(("tests.sub.test_a.TestA", "test_x_cpu_float32", ""))
        self.assertEqual(self.holes(), {})

    def test_tests_that_decorators_make_and_that_skip(self):
        self.write("tests/sub/test_a.py", "class TestA(TestCase):\n    @expand([1, 2])\n    def test_x(self, x): pass")
        skip = '<skipped message="no"/>'
        self.junit(*(("tests.sub.test_a.TestA", f"test_x_{n}", skip) for n in (0, 1)))
        self.assertIn("tests/sub/test_a.py:3  test_x_0, test_x_1: ", "\n".join(census_lines(self.census())))

    def test_two_files_of_one_name_are_unknown(self):
        self.write("tests/other/test_a.py", "def test_y(): pass")
        self.junit(("test_a.TestA", "test_x", ""), ("test_a", "test_y", ""))
        self.assertEqual({hole.reason for hole in self.holes().values()}, {HoleReason.UNKNOWN})

    def test_skips_of_pytest(self):
        at_line = '<skipped type="pytest.skip" message="no">/x/tests/sub/test_a.py:2: no</skipped>'
        self.junit(("tests.sub.test_a.TestA", "test_x", at_line), ("tests.sub.test_a", "test_y", "<failure/>"))
        self.assertHole("sub/test_a.py::TestA::test_x", HoleReason.BY_HAND, "^tests/sub/test_a.py:2: no$")

    def test_a_module_that_pytest_skips(self):
        at_import = '<skipped type="pytest.skip" message="collection skipped">could not import</skipped>'
        self.junit(("", "tests.sub.test_a", at_import))
        self.assertEqual({hole.reason for hole in self.holes().values()}, {HoleReason.AT_IMPORT})

    def test_xfail_of_pytest(self):
        failed = '<skipped type="pytest.xfail" message="reason"/>'
        not_run = '<skipped type="pytest.xfail" message="[NOTRUN] reason"/>'
        self.junit(("tests.sub.test_a.TestA", "test_x", failed), ("tests.sub.test_a", "test_y", not_run))
        self.assertHole("sub/test_a.py::test_y", HoleReason.NOT_JUDGED, "run=False")


class CommandTest(CensusTestCase):
    def command(self, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(["census", *map(str, words)], self.root)
        return code, out.getvalue(), err.getvalue()

    def test_the_page(self):
        self.write("tests/test_a.py", "def test_ran(): pass\ndef test_not(): pass\n")
        self.write("tests/far/test_b.py", "def test_x(): pass\n")
        self.junit(("tests.test_a", "test_ran", ""))
        document = self.root / "census.json"
        words = (*self.results, "--tests", self.root / "tests", "--json", document)
        code, page, _ = self.command(*words)
        self.assertEqual(code, 0)
        self.assertIn("2 of 3 tests not seen running in 1 run", page)
        self.assertIn("  tests/test_a.py:2  test_not: no results have it, though they have other tests", page)
        self.assertIn("       1  tests/far\n", page)
        self.assertEqual(json.loads(document.read_text())["new"], 2)
        self.assertEqual(self.command(*words, "--max-new", "2")[0], 0)
        self.assertEqual(self.command(*words, "--max-new", "1")[0], 1)

    def test_tests_of_one_file_stand_together(self):
        self.write("tests/test_a.py", "def test_ran(): pass\n")
        self.write("tests/test_b.py", "".join(f"def test_{n}(): pass\n" for n in range(9)))
        self.junit(("tests.test_a", "test_ran", ""))
        _, page, _ = self.command(*self.results, "--tests", self.root / "tests")
        self.assertIn("  tests/test_b.py:1  test_0, test_1, test_2 and 6 more: no results have a test", page)
        self.assertNotIn("test_3", page)

    def test_places_that_ci_names_in_vain_stand_once(self):
        self.write("tests/test_a.py", "def test_ran(): pass\n")
        self.write(".gitlab-ci.yml", "a:\n  script:\n  - pytest tests/test_a.py tests/gone.py tests/lost\n")
        code, page, _ = self.command("--tests", self.root / "tests", "--max-new", "0")
        self.assertEqual(code, 0)
        self.assertIn("0 of 1 test cannot run: so say the source and the configuration of CI", page)
        self.assertEqual(page.count(".gitlab-ci.yml:3 names tests/gone.py"), 1)
        self.assertEqual(page.count(".gitlab-ci.yml:3 names tests/lost"), 1)

    def test_usage(self):
        self.write("tests/test_a.py", "def test_ran(): pass\n")
        self.junit(("elsewhere.test_b", "test_ran", ""))
        for words, why in (
            (self.results, "none of 1 result is of a test in .*, such as .*test_ran"),
            ((*self.results, "--tests", "nowhere"), "there is no such folder"),
            ((self.root / "no.xml",), "no.xml: No such file"),
            ((*self.results, "--max-new", "-1"), "from 0"),
        ):
            with self.subTest(why):
                code, _, error = self.command(*words)
                self.assertEqual(code, 4)
                self.assertRegex(error, why)
                self.assertEqual(error.count("\n"), 1)
