"""What unittest would run, runs: every test of a file has a name of its own and a result, however it came to be."""

import textwrap

from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.selection import Selection


def setUpModule():
    global PROJECT
    PROJECT = Project(by_pytest=False)


def tearDownModule():
    PROJECT.close()


class CollectionCase(TestCase):
    def run_source(self, source, **options):
        """The results by name without the file."""
        self.file = PROJECT.write("import os, sys, unittest\n" + textwrap.dedent(source))
        self.ran = PROJECT.run(self.file, **options)
        results = [str(one.test.id).removeprefix(f"{self.file}::") for one in self.ran.summary.finished]
        self.assertEqual(len(results), len(set(results)), "two results have the same name")
        return {name.removeprefix(f"{self.file}::"): outcome for name, outcome in self.ran.by_id.items()}

    def message_of(self, name):
        return next(one.last.said for one in self.ran.summary.finished if str(one.test.id) == f"{self.file}::{name}")


class TestSameNames(CollectionCase):
    def test_classes_of_one_factory(self):
        self.assertEqual(
            self.run_source(
                """
                def make(number):
                    class T(unittest.TestCase):
                        def test_a(self): self.assertNotEqual(number, 2)
                        def test_b(self): pass
                    return T
                One, Two = make(1), make(2)
                """
            ),
            {"One::test_a": "passed", "One::test_b": "passed", "Two::test_a": "failed", "Two::test_b": "passed"},
        )

    def test_classes_of_one_factory_with_fixtures(self):
        self.assertEqual(
            self.run_source(
                """
                def make(number):
                    class T(unittest.TestCase):
                        @classmethod
                        def setUpClass(cls):
                            if number == 2: raise LookupError("no fixture")
                            cls.number = number
                        def test_a(self): self.assertEqual(self.number, number)
                    return T
                One, Two, Three = make(1), make(2), make(3)
                """
            ),
            {"One::test_a": "passed", "Two::test_a": "error", "Three::test_a": "passed"},
        )

    def test_classes_that_only_load_tests_knows(self):
        self.assertEqual(
            self.run_source(
                """
                def make(number):
                    class T(unittest.TestCase):
                        @classmethod
                        def setUpClass(cls): cls.number = number
                        def test_a(self): self.assertNotEqual(self.number, 2)
                    return T
                def load_tests(loader, tests, pattern):
                    return unittest.TestSuite(loader.loadTestsFromTestCase(make(n)) for n in (1, 2, 3))
                """
            ),
            {
                "make.<locals>.T::test_a": "passed",
                "make.<locals>.T::test_a#2": "failed",
                "make.<locals>.T::test_a#3": "passed",
            },
        )

    def test_a_class_with_two_names(self):
        """unittest runs it twice."""
        results = self.run_source("class T(unittest.TestCase):\n    def test_a(self): pass\nAgain = T\n")
        self.assertEqual(results, {"T::test_a": "passed", "T::test_a#2": "passed"})

    def test_one_test_twice(self):
        for fixture in ("", "    @classmethod\n    def setUpClass(cls): pass\n"):
            with self.subTest(fixture=fixture):
                results = self.run_source(
                    "class T(unittest.TestCase):\n    count = 0\n" + fixture + "    def test_a(self):\n"
                    "        T.count += 1\n"
                    f"        self.assertLess(T.count, {2 if fixture else 9})\n"
                    "def load_tests(loader, tests, pattern):\n"
                    "    test = T('test_a')\n"
                    "    return unittest.TestSuite([test, test])\n"
                )
                # With the fixture, both run in one process.
                self.assertEqual(results, {"T::test_a": "passed", "T::test_a#2": "failed" if fixture else "passed"})

    def test_a_name_that_a_number_would_repeat(self):
        results = self.run_source(
            """
            class T(unittest.TestCase):
                def test_a(self): pass
            setattr(T, "test_a#2", lambda self: self.fail())
            def load_tests(loader, tests, pattern):
                return unittest.TestSuite([T("test_a"), T("test_a#2"), T("test_a")])
            """
        )
        self.assertEqual(results, {"T::test_a": "passed", "T::test_a#2": "failed", "T::test_a#3": "passed"})

    def test_a_retry_runs_the_one_that_failed(self):
        results = self.run_source(
            """
            def make(number):
                class T(unittest.TestCase):
                    def test_a(self):
                        with open(f"count{number}", "a+") as file:
                            file.write("x")
                            file.seek(0)
                            self.assertTrue(number == 1 or len(file.read()) == 3)
                return T
            def load_tests(loader, tests, pattern):
                return unittest.TestSuite(make(number)("test_a") for number in (1, 2))
            """,
            retries=2,
        )
        self.assertEqual(results, {"make.<locals>.T::test_a": "passed", "make.<locals>.T::test_a#2": "flaky"})
        self.assertEqual((PROJECT.root / "count1").read_text(), "x")

    def test_each_can_be_selected(self):
        self.file = PROJECT.write(
            """
            import unittest
            def make(): return type("T", (unittest.TestCase,), {"test_a": lambda self: None})
            One = make()
            def load_tests(loader, tests, pattern): return unittest.TestSuite([One("test_a"), make()("test_a")])
            """
        )
        tests = PROJECT.preloaded_server.discover([self.file]).tests
        self.assertEqual(len(tests), 2)
        for test in tests:
            selection = Selection.of(Options(names=(str(test.id),)), PROJECT.root, PROJECT.root)
            self.assertEqual(selection.tests(tests, [self.file]), (test,))


class TestOtherTests(CollectionCase):
    """Tests that are not methods of a TestCase."""

    def test_doctests(self):
        results = self.run_source(
            '''
            def good():
                """
                >>> 1 + 1
                2
                """
            def bad():
                """
                >>> 1 + 1
                3
                """
            def load_tests(loader, tests, pattern):
                import doctest
                return doctest.DocTestSuite(sys.modules[__name__])
            '''
        )
        module = self.file.removesuffix(".py")
        self.assertEqual(results, {f"DocTestCase::{module}.bad": "failed", f"DocTestCase::{module}.good": "passed"})
        self.assertIn("Expected:\n    3", self.message_of(f"DocTestCase::{module}.bad"))

    def test_function_test_cases(self):
        results = self.run_source(
            """
            def check_good(): pass
            def check_bad(): raise LookupError("not found")
            def load_tests(loader, tests, pattern):
                cases = [unittest.FunctionTestCase(check) for check in (check_good, check_bad, check_good)]
                return unittest.TestSuite(cases)
            """
        )
        self.assertEqual(
            results,
            {
                "FunctionTestCase::check_good": "passed",
                "FunctionTestCase::check_bad": "error",
                "FunctionTestCase::check_good#2": "passed",
            },
        )

    def test_tests_that_are_no_test_cases(self):
        results = self.run_source(
            """
            class Check:
                __slots__ = ("good",)
                failureException = AssertionError
                def __init__(self, good): self.good = good
                def countTestCases(self): return 1
                def id(self): return f"a check: {self.good}"
                def __call__(self, result):
                    result.startTest(self)
                    try:
                        assert self.good
                        result.addSuccess(self)
                    except AssertionError:
                        result.addFailure(self, sys.exc_info())
                    result.stopTest(self)
            def load_tests(loader, tests, pattern):
                return unittest.TestSuite([Check(True), Check(False)])
            """
        )
        self.assertEqual(results, {"Check::a check: True": "passed", "Check::a check: False": "failed"})

    def test_ids_of_their_own(self):
        """As libraries for scenarios give them to clones of one test."""
        results = self.run_source(
            """
            class T(unittest.TestCase):
                size = 0
                def id(self): return f"{super().id()}(size {self.size})"
                def test_a(self): self.assertNotEqual(self.size, 2)
            def load_tests(loader, tests, pattern):
                tests = [T("test_a"), T("test_a")]
                tests[0].size, tests[1].size = 1, 2
                return unittest.TestSuite(tests)
            """
        )
        self.assertEqual(results, {"T::test_a(size 1)": "passed", "T::test_a(size 2)": "failed"})


class TestLoadTests(CollectionCase):
    PLAIN = "class T(unittest.TestCase):\n    def test_a(self): pass\n"

    def load(self, body, **options):
        return self.run_source(f"{self.PLAIN}def load_tests(loader, tests, pattern):\n    {body}\n", **options)

    def test_what_it_adds(self):
        more = "class Hidden(unittest.TestCase):\n        def test_b(self): self.fail()"
        results = self.load(f"{more}\n    tests.addTest(Hidden('test_b'))\n    return tests")
        self.assertEqual(results, {"T::test_a": "passed", "load_tests.<locals>.Hidden::test_b": "failed"})

    def test_an_error_in_it(self):
        self.assertEqual(self.load("raise LookupError('no list')"), {self.file: "error"})
        self.assertIn("LookupError: no list", self.ran[self.file].said)
        self.assertIn("in load_tests", self.ran[self.file].said)

    def test_a_skip_in_it(self):
        self.assertEqual(self.load("raise unittest.SkipTest('not here')"), {self.file: "skipped"})
        self.assertEqual(self.ran[self.file].said, "not here")

    def test_nothing_from_it(self):
        self.assertEqual(self.load("pass"), {self.file: "error"})
        self.assertIn("load_tests returned", self.ran[self.file].said)
        self.assertEqual(self.load("return unittest.TestSuite([T('test_a'), 3])"), {self.file: "error"})

    def test_modules_that_it_cannot_load(self):
        results = self.load("return loader.loadTestsFromNames(['no_such_module', 'no_such_module.part'])")
        self.assertEqual(results, {"_FailedTest::no_such_module": "error", "_FailedTest::no_such_module#2": "error"})

    def test_an_empty_suite(self):
        self.assertEqual(self.load("return unittest.TestSuite()"), {})
        self.assertIn(f"{self.file} has no tests: unittest finds none in it", PROJECT.preloaded_server.warnings)

    def test_a_suite_that_runs_its_tests_in_its_own_way(self):
        """It cannot be taken apart, and must not be dropped."""
        suite = "class Around(unittest.TestSuite):\n        def run(self, result, debug=False): return result"
        results = self.load(f"{suite}\n    return unittest.TestSuite([Around([T('test_a')]), T('test_a')])")
        self.assertEqual(results, {"load_tests.<locals>.Around::run": "error", "T::test_a": "passed"})
        self.assertIn("has a run() of its own", self.message_of("load_tests.<locals>.Around::run"))

    def test_another_subclass_of_suite(self):
        suite = "class Mine(unittest.TestSuite): pass"
        self.assertEqual(self.load(f"{suite}\n    return Mine([T('test_a')])"), {"T::test_a": "passed"})


class TestUnusualRuns(CollectionCase):
    """Tests that report more or less than one run of themselves."""

    def test_a_test_that_runs_twice_fails_if_either_run_fails(self):
        for bad in (1, 2):
            with self.subTest(bad=bad):
                results = self.run_source(
                    f"""
                    class T(unittest.TestCase):
                        count = 0
                        def run(self, result=None):
                            super().run(result)
                            return super().run(result)
                        def test_a(self):
                            T.count += 1
                            self.assertNotEqual(T.count, {bad})
                        def test_b(self): pass
                    """
                )
                self.assertEqual(results, {"T::test_a": "failed", "T::test_b": "passed"})

    def test_a_test_that_runs_another(self):
        results = self.run_source(
            """
            class Inner(unittest.TestCase):
                def check_good(self): pass
                def check_bad(self): self.fail("within")
            class T(unittest.TestCase):
                def run(self, result=None): return Inner(self._testMethodName.replace("test", "check")).run(result)
                def test_good(self): pass
                def test_bad(self): pass
            """
        )
        self.assertEqual(results, {"T::test_good": "passed", "T::test_bad": "failed"})

    def test_a_test_that_does_not_run(self):
        results = self.run_source(
            """
            class T(unittest.TestCase):
                def run(self, result=None): return result
                def test_a(self): self.fail()
                def test_b(self): self.fail()
            """
        )
        self.assertEqual(results, {"T::test_a": "error", "T::test_b": "error"})

    def test_a_test_without_a_method(self):
        results = self.run_source(
            """
            def load_tests(loader, tests, pattern): return unittest.TestSuite([unittest.TestCase()])
            """
        )
        self.assertEqual(list(results.values()), ["error"])

    def test_tests_that_are_gone_when_the_file_is_imported_again(self):
        results = self.run_source(
            """
            import threading
            threading.Thread(target=threading.Event().wait, daemon=True).start()  # a new interpreter for each test
            class T(unittest.TestCase):
                def test_a(self): pass
            with open("imports", "a+") as file:
                file.write("x")
                file.seek(0)
                first = len(file.read()) == 1
            def load_tests(loader, tests, pattern):
                return unittest.TestSuite([T("test_a")] * (2 if first else 1))
            """
        )
        self.assertEqual(results, {"T::test_a": "passed", "T::test_a#2": "error"})
        self.assertIn("was listed, but does not exist", self.message_of("T::test_a#2"))


if __name__ == "__main__":
    run_tests()
