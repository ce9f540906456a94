"""Runs of run_test.py with the options that users of PyTorch's type: disabled tests, local variables, coverage."""

import json
import unittest
from pathlib import Path

import pytest
from kit.files import FolderCase, subject
from kit.runs import RUN_TEST, run_test

SUBJECT = subject(__file__, "as_pytorchs_users.py")
pytestmark = pytest.mark.slow
ISSUE = "https://github.com/pytorch/pytorch/issues/7"


class AsPytorchsUsersTest(FolderCase):
    """Each test is a run of its own."""

    def setUp(self):
        super().setUp()
        self.write("run_test.py", RUN_TEST.format(before="").replace(".parent)", ".parent, as_pytorch=True)"))
        self.write("pytest.ini", "[pytest]\n")
        self.write("test_x.py", SUBJECT)
        self.write("sums.py", "def sign(x):\n    return 1 if x else 0\n\n\ndef never():\n    return 2\n")

    def test_a_run(self):
        disabled = {"test_leaves (__main__.Ranks)": [ISSUE, []], "test_other_suite (__main__.Other)": [ISSUE, []]}
        self.write("theirs.json", json.dumps(disabled))
        self.write("ours.txt", "test_x.py::test_hangs # it waits for ever, #12\n")
        words = ("--distributed-tests", "--keep-going", "--shard", "1", "1", "--showlocals", "--results=r.json")
        run = run_test(self.root, *words, "--disabled", "theirs.json", "--disabled=ours.txt", "-i", "test_x")
        self.assertEqual(run.console.splitlines()[-1], "1 passed, 2 failed, 2 skipped", run.console + run.complaints)
        results = json.loads(run.report("r.json"))["tests"]
        skipped = {each["id"]: each["attempts"][-1]["message"] for each in results if each["outcome"] == "skipped"}
        self.assertEqual(
            skipped,
            {
                "test_x.py::Ranks::test_leaves": f"disabled: {ISSUE}",
                "test_x.py::test_hangs": "disabled: it waits for ever, #12",
            },
        )
        self.assertIn("of_ranks = 3", run.console)
        self.assertRegex(run.console, "of_plain += 4")
        self.assertIn("--keep-going changes nothing", run.complaints)

    def test_coverage(self):
        """coverage.py reaches other interpreters only from the site-packages of this one."""
        if not any(Path(folder, "a1_coverage.pth").is_file() for folder in _site_folders()):
            self.skipTest("coverage.py is not in a folder of which Python executes the .pth files")
        run = run_test(self.root, "-c", "-k", "test_signs", cold=True)
        self.assertEqual(run.console.splitlines()[-2], "1 passed, 0 failed, 0 skipped", run.console + run.complaints)
        for complaint in ("No data was collected", "CoverageWarning", "left out"):
            self.assertNotIn(complaint, run.complaints)
        self.assertRegex(run.console.splitlines()[-1], r"^coverage: \d+ % of the lines, in htmlcov/index.html$")
        page = (self.root / "htmlcov" / "sums_py.html").read_text(encoding="utf-8")
        self.assertEqual(page.count('class="mis show_mis"'), 1, page)


def _site_folders():
    import site

    return [*site.getsitepackages(), site.getusersitepackages()]


if __name__ == "__main__":
    unittest.main()
