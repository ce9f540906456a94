"""Tests that lists disable, in the forms of such lists."""

import json
import unittest
from pathlib import Path

from kit.files import FolderCase
from kit.invented import make_test

from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.scheduling.disabled_tests import read_lists, stale, without_disabled

STORE = "test/test_store.py"
TESTS = (
    make_test("test_get", STORE, "StoreTest"),
    make_test("test_get_twice", STORE, "StoreTest"),
    make_test("test_add[1]", STORE, ""),
    make_test("test_add[2]", STORE, ""),
    make_test("test_sum_cuda_float32", "test/test_sum.py", "SumTestCUDA"),
    make_test("test_sum_cuda", "test/test_sum.py", "SumTestCUDA"),
)
ISSUE = "https://github.com/pytorch/pytorch/issues/7"


class DisabledTestsTest(FolderCase):
    def lists(self, *texts):
        paths = [Path(self.root, f"list{number}") for number, _ in enumerate(texts)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        return read_lists(paths)

    def skipped(self, *texts, kind=None, **environ):
        tests = without_disabled(TESTS, self.lists(*texts), kind, environ)
        return {test.id.method: test.skip for test in tests if test.skip is not None}

    def test_lines(self):
        text = f"""
        # a comment
        {STORE}::StoreTest::test_get  # hangs, {ISSUE}
        {STORE}::test_add # flaky, #12
        """
        self.assertEqual(
            self.skipped(text),
            {
                "test_get": f"disabled: hangs, {ISSUE}",
                "test_add[1]": "disabled: flaky, #12",
                "test_add[2]": "disabled: flaky, #12",
            },
        )
        self.assertEqual(set(self.skipped(f"{STORE}::test_add[2] # why")), {"test_add[2]"})
        self.assertEqual(set(self.skipped(f"{STORE}::StoreTest # why")), {"test_get", "test_get_twice"})
        self.assertEqual(len(self.skipped(f"{STORE} # why")), 4)
        self.assertEqual(self.skipped("test/test_st # no file has this name"), {})

    def test_json_of_pytorch(self):
        """In both of its forms: as its CI publishes it, and as its tests read it."""
        for facts in ([ISSUE, []], ["7", ISSUE, []]):
            with self.subTest(facts):
                skipped = self.skipped(json.dumps({"test_get (__main__.StoreTest)": facts}))
                self.assertEqual(skipped, {"test_get": f"disabled: {ISSUE}"})

    def test_pytorch_leaves_out_types_and_ends_of_classes(self):
        text = json.dumps({"test_sum (__main__.SumTest)": [ISSUE, []]})
        self.assertEqual(set(self.skipped(text)), {"test_sum_cuda_float32"})
        text = json.dumps({"test_sum_cuda (__main__.SumTestCUDA)": [ISSUE, []]})
        self.assertEqual(set(self.skipped(text)), {"test_sum_cuda"})

    def test_platforms(self):
        def skips(*platforms, **more):
            return bool(self.skipped(json.dumps({"test_get (a.StoreTest)": [ISSUE, platforms]}), **more))

        self.assertTrue(skips("linux", "win") or skips("mac", "win"))
        self.assertFalse(skips("rocm"))
        self.assertTrue(skips("rocm", kind="hip"))
        self.assertTrue(skips("win", "asan", PYTORCH_TEST_WITH_ASAN="1"))
        self.assertFalse(skips("asan", "xpu", "slow"))
        # Nothing is known of it.
        self.assertTrue(skips("amiga"))
        self.assertFalse(skips("amiga", "rocm"))

    def test_several_lists(self):
        skipped = self.skipped(f"{STORE}::StoreTest::test_get # one", f"{STORE}::StoreTest # two")
        self.assertEqual(skipped, {"test_get": "disabled: one", "test_get_twice": "disabled: two"})

    def test_wrong_lists(self):
        for text, why in (
            ("a\n\ntest_x.py", "list0: line 1 gives no reason: write a # why"),
            ("{", "list0: .*column 2"),
            ('{"test_x (a.B)": "why"}', "list0: 'test_x .a.B.' has neither an issue with platforms"),
            ('{"test_x (a.B)": ["why", "linux"]}', "has neither"),
        ):
            with self.subTest(text), self.assertRaisesRegex(UsageError, why):
                self.lists(text)
        with self.assertRaisesRegex(UsageError, "--disabled .*none: No such file"):
            read_lists([Path(self.root, "none")])

    def test_names_that_are_gone(self):
        text = (
            f"{STORE}::StoreTest::test_gett # why\ntest/test_gone.py # why\ntest/test_other.py::test_x # not imported"
        )
        disabled = self.lists(text, json.dumps({"test_gone (a.B)": [ISSUE, []]}))
        warnings = list(stale(disabled, TESTS, [STORE, "test/test_sum.py", "test/test_other.py"]))
        self.assertEqual(len(warnings), 2, warnings)
        self.assertIn(f"no test has the name {STORE}::StoreTest::test_gett. Did you mean: {STORE}::", warnings[0])
        self.assertIn("test/test_gone.py", warnings[1])


if __name__ == "__main__":
    unittest.main()
