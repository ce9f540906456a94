"""Selecting files and tests by names and expressions."""

import tempfile
import unittest
from pathlib import Path

from kit.invented import make_test

from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.scheduling import expressions
from torch_testing_ext.runner.scheduling.finding_files import test_files
from torch_testing_ext.runner.scheduling.selection import Selection

PARALLEL = "test/distributed/tensor/parallel/test_tp_examples.py"
OTHER_2D = "test/distributed/tensor/parallel/test_tp_style.py"
TP = "test/distributed/tensor/test_tp.py"
FSDP = "test/distributed/fsdp/test_fsdp.py"
FILES = (FSDP, PARALLEL, OTHER_2D, TP)
TESTS = (
    make_test("test_mlp", PARALLEL, "ExamplesTest"),
    make_test("test_mlp_large", PARALLEL, "ExamplesTest"),
    make_test("test_mlp", PARALLEL, "OtherTest"),
    make_test("test_mlp", FSDP, "FsdpTest"),
)
NOWHERE = Path("/nowhere")


def selection(*names, cwd=NOWHERE, root=NOWHERE, **more):
    return Selection.of(Options(names=names, **more), root, cwd)


def selected(*names, **more):
    return [str(test.id) for test in selection(*names, **more).tests(TESTS, FILES)]


class ParametersTest(unittest.TestCase):
    def test_all_of_one_test(self):
        """A name without parameters selects the test with any, and no other that begins with the name."""
        tests = [make_test(name, FSDP, "") for name in ("test_a[1]", "test_a[x-2]", "test_ab[1]", "test_abc")]
        for name, expected in (
            ("test_a", ["test_a[1]", "test_a[x-2]"]),
            ("test_a[1]", ["test_a[1]"]),
            ("test_abc", ["test_abc"]),
            ("test_", ["test_a[1]", "test_a[x-2]", "test_ab[1]", "test_abc"]),
        ):
            with self.subTest(name=name):
                found = selection(f"{FSDP}::{name}").tests(tests, FILES)
                self.assertEqual([test.id.method for test in found], expected)


class FilesTest(unittest.TestCase):
    def test_names(self):
        for name, expected in (
            (PARALLEL, [PARALLEL]),
            ("test/distributed/tensor", [PARALLEL, OTHER_2D, TP]),
            ("distributed/tensor/parallel", [PARALLEL, OTHER_2D]),
            ("distributed/tensor/parallel/", [PARALLEL, OTHER_2D]),
            ("distributed.tensor.parallel.test_tp_examples", [PARALLEL]),
            ("parallel/test_tp_examples", [PARALLEL]),
            ("test_tp_examples.py", [PARALLEL]),
            ("test_tp_examples", [PARALLEL]),
            ("test_tp", [TP]),  # an exact name excludes names that begin with it
            ("test_tp_", [PARALLEL, OTHER_2D]),
            ("tensor/par", [PARALLEL, OTHER_2D]),
            ("tensor/parallel/test_tp_e", [PARALLEL]),
            ("test_fsdp::FsdpTest", [FSDP]),
            ("::FsdpTest", list(FILES)),
        ):
            with self.subTest(name=name):
                self.assertEqual(list(selection(name).files(FILES)), expected)

    def test_everything_by_default_and_nothing_twice(self):
        self.assertEqual(selection().files(FILES), FILES)
        self.assertEqual(selection("fsdp", FSDP, include=("test_fsdp",)).files(FILES), (FSDP,))

    def test_include_and_exclude(self):
        self.assertEqual(selection(include=("tensor",), exclude=("parallel",)).files(FILES), (TP,))
        self.assertEqual(selection(exclude=("test_fsdp::FsdpTest",)).files(FILES), FILES)

    def test_a_path_is_relative_to_the_working_directory(self):
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            file = root / PARALLEL
            file.parent.mkdir(parents=True)
            file.touch()
            for name, cwd in (("test_tp_examples.py", file.parent), (".", file.parent), (str(file), NOWHERE)):
                with self.subTest(name=name):
                    found = selection(name, root=root, cwd=cwd).files((FSDP, PARALLEL))
                    self.assertEqual(found, (PARALLEL,))

    def test_links(self):
        """Names are those under which files are found: by links out of the folders, too, but by none within them."""
        with tempfile.TemporaryDirectory() as directory:
            root, elsewhere = Path(directory, "root"), Path(directory, "elsewhere")
            for file in (
                root / "test/real/test_a.py",
                elsewhere / "deep/test_b.py",
                root / "test/.venv/test_c.py",
                root / "test/own/test_d.py",
                root / "test/node_modules/test_e.py",
            ):
                file.parent.mkdir(parents=True)
                file.touch()
            (root / "test/own/pyvenv.cfg").touch()
            (root / "test/again").symlink_to("real")
            (root / "test/linked").symlink_to(elsewhere)
            (elsewhere / "deep/back").symlink_to(root)
            (root / "test/test_f.py").symlink_to("real/test_a.py")
            files = ("test/linked/deep/test_b.py", "test/real/test_a.py", "test/test_f.py")
            self.assertEqual(test_files(Options(tests=(root / "test",)), root, root), files)
            for name in ("test/linked/deep/test_b.py", "test/test_f.py"):
                with self.subTest(name=name):
                    self.assertEqual(test_files(Options(names=(name,), tests=()), root, root), (name,))
                    self.assertEqual(selection(name, root=root, cwd=root).files(files), (name,))

    def test_unknown(self):
        for name, near in (
            ("test_tp_exmaples", "test_tp_examples"),
            ("distributed/tensr/parallel/test_tp_examples.py", PARALLEL),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(UsageError, f"{name}: .*Did you mean: {near}"):
                selection(name).files(FILES)
        for name, command in (("shwo", "show"), ("cluster", "cluster clean")):
            with self.assertRaisesRegex(UsageError, rf"{name}: .*Did you mean the command {command}\?"):
                selection(name).files(FILES)
        with self.assertRaises(UsageError):
            selection(exclude=("nothing_like_it",)).files(FILES)
        with self.assertRaises(UsageError):
            selection("test_ts").files(())


class TestsTest(unittest.TestCase):
    def test_names(self):
        examples = f"{PARALLEL}::ExamplesTest::test_mlp"
        for name, expected in (
            ("test_tp_examples::ExamplesTest::test_mlp", [examples]),
            ("test_tp_examples::ExamplesTest", [examples, f"{examples}_large"]),
            ("test_tp_examples::ExamplesTest::test_m", [examples, f"{examples}_large"]),
            ("test_tp_examples::Examples", [examples, f"{examples}_large"]),
            ("test_tp_examples::test_mlp", [examples, f"{PARALLEL}::OtherTest::test_mlp"]),
            ("::FsdpTest", [f"{FSDP}::FsdpTest::test_mlp"]),
            ("::test_mlp_large", [f"{examples}_large"]),
        ):
            with self.subTest(name=name):
                self.assertEqual(selected(name), expected)

    def test_names_with_colons(self):
        """Names of parametrized tests, and paths."""
        tests = (
            make_test("test_a::b", "x.py", "T"),
            make_test("test_a", "x.py", "T"),
            make_test("T::test_a", "x.py", "T"),
            make_test("test_function", "x.py", ""),
            make_test("test_a", "y::z.py", "T"),
        )
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory).resolve()
            (root / "y::z.py").touch()
            for name, expected in (
                ("x.py::T::test_a::b", [0]),
                ("x.py::test_a::b", [0]),
                ("x.py::test_a", [1]),
                ("x.py::T::test_a", [1, 2]),
                ("x.py::T::test_a:", [0]),
                ("x.py::T::T::test_a", [2]),
                ("x.py::test_function", [3]),
                ("y::z.py::T::test_a", [4]),
                ("y::z.py", [4]),
                ("x.py::", [0, 1, 2, 3]),
            ):
                with self.subTest(name=name):
                    chosen = selection(name, root=root, cwd=root).tests(tests, ("x.py", "y::z.py"))
                    self.assertEqual([tests.index(test) for test in chosen], expected)

    def test_names_that_no_path_can_have(self):
        for name in ("x" * 5000, "a\0b", "x" * 5000 + "::T"):
            with self.subTest(name=name[:5]), self.assertRaisesRegex(UsageError, "no test file has this name"):
                selection(name).files(FILES)

    def test_a_file_that_skips_all_of_its_tests(self):
        """It may have the test."""
        skips = Test(TestId("x.py"), skip="not here")
        other = make_test("test_a", "y.py", "T")
        for names, excluded, expected in (
            (("x.py",), (), (skips,)),
            (("x.py::T",), (), (skips,)),
            (("x.py::T::test_a",), (), (skips,)),
            (("::T",), (), (skips, other)),
            (("y.py::T",), (), (other,)),
            ((), ("x.py::T",), (skips, other)),
            ((), ("x.py",), (other,)),
        ):
            with self.subTest(names=names, excluded=excluded):
                found = selection(*names, exclude=excluded).tests((skips, other), ("x.py", "y.py"))
                self.assertEqual(found, expected)

    def test_deselect(self):
        """As pytest's: by the beginning of ids, where `exclude` takes the test of exactly that name."""
        left = [f"{PARALLEL}::OtherTest::test_mlp", f"{FSDP}::FsdpTest::test_mlp"]
        self.assertEqual(selected(deselect=(f"{PARALLEL}::ExamplesTest::test_mlp", "nothing")), left)
        self.assertEqual(selected(deselect=(PARALLEL,)), left[1:])

    def test_exclude(self):
        left = [f"{PARALLEL}::ExamplesTest::test_mlp", f"{FSDP}::FsdpTest::test_mlp"]
        self.assertEqual(selected(exclude=("::OtherTest", "test_tp_examples::ExamplesTest::test_mlp_large")), left)

    def test_all_kinds_of_selection_apply(self):
        self.assertEqual(
            selected("::test_mlp", keyword=("Fsdp", "Other"), exclude=("::FsdpTest",)),
            [f"{PARALLEL}::OtherTest::test_mlp"],
        )

    def test_unknown(self):
        with self.assertRaisesRegex(UsageError, "no test in these files has this name.* Did you mean: ExamplesTest"):
            selected("test_tp_examples::ExampelsTest")
        with self.assertRaisesRegex(UsageError, "Did you mean: .*ExamplesTest::test_mlp_large"):
            selected("test_tp_examples::ExamplesTest::test_mlp_lagre")
        with self.assertRaises(UsageError):
            selected("test_tp_examples::ExamplesTest::test_mlp::more")

    def test_names_in_a_broken_file_are_accepted(self):
        self.assertEqual(selected("test_tp_style::AnyTest"), [])

    def test_tests_that_a_broken_file_may_have(self):
        source = "class OneTest(T):\n    @pytest.mark.gpu\n    async def test_mlp(self): ...\n\ndef test_max(): ...\n"
        for keywords, marks, expected in (
            ((), (), True),
            (("mlp",), (), True),
            (("OneTest and mlp",), (), True),
            (("test_broken",), (), True),
            (("not mlp",), (), True),
            (("attention", "max"), (), True),
            (("attention",), (), False),
            (("mlp and max",), (), False),
            ((), ("gpu",), True),
            ((), ("not gpu",), True),
            ((), ("slow",), False),
            (("attention",), ("gpu",), False),
        ):
            with self.subTest(keywords=keywords, marks=marks):
                selection = Selection.of(Options(keyword=keywords, marks=marks), Path(), Path())
                self.assertIs(selection.may_select_from("test/test_broken.py", source), expected)

    def test_an_excluded_test_may_be_in_a_file_that_is_not_selected(self):
        self.assertEqual(len(selected("test_tp_examples", exclude=("test_tp::TpTest",))), 3)


class KeywordTest(unittest.TestCase):
    TEST = TestId("test/distributed/test_tp.py", "TpTest", "test_mlp_is_seq_parallel_True")

    def test_expressions(self):
        for text, expected in (
            ("mlp", True),
            ("MLP", True),  # as in pytest
            ("tptest", True),
            ("test_tp", True),
            ("distributed", True),
            ("TpTest.test_mlp", True),  # as in unittest
            ("TpTest::test_mlp", True),
            ("fsdp", False),
            ("mlp and fsdp", False),
            ("mlp or fsdp", True),
            ("not fsdp", True),
            ("not mlp", False),
            ("not not mlp", True),
            ("fsdp or mlp and not seq", False),
            ("(fsdp or mlp) and not fsdp", True),
            ("not (mlp and fsdp)", True),
            ("not mlp or seq", True),  # "not" binds most tightly
            ("fsdp and mlp or seq", True),  # "and" before "or"
            ("nothing", False),  # begins with "not"
            ("test_tp.TpTest.test_mlp*", True),
            ("test.distributed.*True", True),
            ("*mlp*", True),
            ("*MLP*", False),
            ("*mlp", False),
            ("mlp*", False),  # a pattern must match the whole name
            ("*mlp* and not *False", True),
        ):
            with self.subTest(text=text):
                self.assertIs(expressions.parse_expression(text)(self.TEST), expected)

    def test_mistakes(self):
        for text, place in (
            ("", "the end"),
            ("and", "'and' at column 1"),
            ("a and", "the end"),
            ("a b", "'b' at column 3"),
            ("(a or b", "the end"),
            ("a)", r"'\)' at column 2"),
            ("a and or b", "'or' at column 7"),
            ("not", "the end"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, f"-k .* found {place}"):
                expressions.parse_expression(text)

    def test_marks(self):
        slow, plain = Test(self.TEST, marks=("gpu", "slow")), Test(self.TEST)
        for text, expected in (
            ("slow", (True, False)),
            ("not slow", (False, True)),
            ("slow and gpu", (True, False)),
            ("(slow or cpu) and not gpu", (False, False)),
            ("slo", (False, False)),  # no part of a name
            ("SLOW", (False, False)),
        ):
            with self.subTest(text=text):
                matches = expressions.parse_marks(text)
                self.assertEqual((matches(slow), matches(plain)), expected)
                self.assertTrue(matches(Test(self.TEST, marks=None)), "a test that could not be collected is dropped")
        for text in ("", "slow and", "slow(1)"):
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, "-m .*, found "):
                expressions.parse_marks(text)


if __name__ == "__main__":
    unittest.main()
