"""The checks of CI: .ci/run finds the README's commands, adds up their results, and fails if any part fails."""

import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest import mock

import pytest

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / ".ci"))

import failures  # noqa: E402

MAKE_TOOLS = (
    "mkdir -p .venv/bin && printf '#!/bin/sh\\nexit {lint}\\n' | tee .venv/bin/ruff > .venv/bin/mypy"
    " && chmod +x .venv/bin/ruff .venv/bin/mypy"
)


class CIRunTest(unittest.TestCase):
    """Runs .ci/run in a small project whose commands only say what tests would say."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.project, self.tools, self.out = (Path(folder.name, name) for name in ("project", "tools", "out"))
        (self.project / ".ci").mkdir(parents=True)
        for name in ("run", "broken_contracts.py", "failures.py", "constraints.txt"):
            (self.project / ".ci" / name).write_bytes((ROOT / ".ci" / name).read_bytes())
        subprocess.run(["git", "init", "--quiet", self.project], check=True)
        self.tools.mkdir()
        (self.tools / "chromium").write_text("#!/bin/sh\n")  # or .ci/run installs it
        (self.tools / "chromium").chmod(0o755)

    def ran(self, *parts, lint=0, contributing="", **commands):
        """Run .ci/run and return its exit code and its lines."""
        if not contributing:
            commands.setdefault("slow", self.counts(0, 0, 0))
            commands.setdefault("wheel", self.counts(0, 0, 0))
        commands["test"] = f"{MAKE_TOOLS.format(lint=lint)} && {commands.get('test', 'true')}"
        pages = [f"<!-- command: {name} -->\n```\n{command}\n```\n" for name, command in commands.items()]
        (self.project / "README.md").write_text("# Title\n\n" + "\nMore.\n\n".join(pages))
        (self.project / "CONTRIBUTING.md").write_text(contributing)
        environ = {**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}", "CI_RESULTS": str(self.out)}
        command = ["bash", self.project / ".ci/run", *parts]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout.splitlines()

    def counts(self, passed, failed, skipped):
        return f"echo '{passed} passed, {failed} failed, {skipped} skipped'"

    def test_the_results_are_added_up(self):
        slow = f"<!-- command: slow -->\n```\n{self.counts(530, 0, 301)}\n```\n"
        wheel = f"<!-- command: wheel -->\n```\n{self.counts(20, 0, 0)}\n```\n"
        code, lines = self.ran(main=self.counts(1, 0, 100), test=self.counts(2, 0, 0), contributing=slow + wheel)
        self.assertEqual((code, lines[-1]), (0, "553 passed, 0 failed, 401 skipped"), lines)

    @pytest.mark.slow
    def test_every_part_counts(self):
        good, bad = self.counts(5, 0, 1), f"{self.counts(4, 1, 1)}; false"
        for commands, last in (
            ({"main": bad, "test": good}, "9 passed, 1 failed, 2 skipped"),
            ({"main": good, "test": bad}, "9 passed, 1 failed, 2 skipped"),
            ({"main": f"{good}; false", "test": good}, "10 passed, 1 failed, 2 skipped"),
            ({"main": self.counts(4, 1, 1), "test": good}, "9 passed, 1 failed, 2 skipped"),
            ({"main": "true", "test": good}, "5 passed, 1 failed, 1 skipped"),
            ({"test": good}, "5 passed, 1 failed, 1 skipped"),
            ({"main": good, "test": good, "lint": 1}, "10 passed, 1 failed, 2 skipped"),
            ({"main": good, "test": good, "slow": "false"}, "10 passed, 1 failed, 2 skipped"),
            ({"main": good, "test": good, "slow": bad}, "14 passed, 1 failed, 3 skipped"),
            ({"main": good, "test": good, "wheel": bad}, "14 passed, 1 failed, 3 skipped"),
        ):
            with self.subTest(**commands):
                code, lines = self.ran(**commands)
                self.assertEqual((code, lines[-1]), (1, last), lines)

    def test_the_last_line_of_a_part_counts(self):
        code, lines = self.ran("main", main=f"{self.counts(0, 7, 0)}; {self.counts(1, 0, 0)}")
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"), lines)

    @pytest.mark.slow
    def test_failed_tests_run_again(self):
        """Real runs of pytest: it keeps which tests have failed."""
        (self.project / "test_it.py").write_text(
            "import os, pathlib\n"
            "def test_good(): pass\n"
            "def test_flaky():\n"
            "    seen = pathlib.Path('seen')\n"
            "    if not seen.exists():\n"
            "        seen.touch()\n"
            "        raise ValueError('only at first')\n"
            "def test_bad(): assert 'BAD' not in os.environ\n"
        )
        python = f"mkdir -p .venv/bin && ln -sf {sys.executable} .venv/bin/python"
        run = '.venv/bin/python -m pytest -q test_it.py --junitxml="$CI_JUNIT"'
        test = f"{python} && {run}; code=$?; {{}}; (exit $code)"
        code, lines = self.ran("test", test=test.format(self.counts(2, 1, 0)))
        self.assertEqual((code, lines[-1]), (0, "3 passed, 0 failed, 0 skipped"), lines)
        (at,) = (number for number, line in enumerate(lines) if line.startswith("+ FLAKY"))
        self.assertIn("  test_it.py::test_flaky", lines[at:])
        self.assertIn("only at first", "\n".join(lines[at:]))
        # Those of the wheel know their environment.
        (self.project / "conftest.py").write_text(
            "def pytest_addoption(parser):\n    parser.addoption('--environment', required=True)\n"
        )
        wheel = test.replace(run, f"{run} --environment build/stranger")
        code, lines = self.ran("test", "wheel", test=python, wheel=wheel.format(self.counts(2, 1, 0)))
        self.assertEqual((code, lines[-1]), (1, "3 passed, 1 failed, 0 skipped"), lines)
        (self.project / "conftest.py").unlink()
        with mock.patch.dict(os.environ, CI_FLAKY="fail"):
            code, lines = self.ran("test", test=test.format(self.counts(2, 1, 0)))
        self.assertEqual((code, lines[-1]), (1, "2 passed, 1 failed, 0 skipped"), lines)
        with mock.patch.dict(os.environ, BAD="1"):
            code, lines = self.ran("test", test=test.format(self.counts(1, 2, 0)))
        self.assertEqual((code, lines[-1]), (1, "1 passed, 2 failed, 0 skipped"), lines)
        # No test has failed: the run has left something behind, for example.
        code, lines = self.ran("test", test=f"{python} && {run} -k good; {self.counts(1, 0, 0)}; false")
        self.assertEqual((code, lines[-1]), (1, "1 passed, 1 failed, 0 skipped"), lines)
        self.assertNotIn("+ [test] its failed tests again", lines)

    def test_some_parts(self):
        code, lines = self.ran("test", main="false", test=self.counts(2, 0, 0), lint=1)
        self.assertEqual((code, lines[-1]), (0, "2 passed, 0 failed, 0 skipped"), lines)
        self.assertEqual(self.ran("tests")[0], 4)

    def test_the_newest_torch_is_only_for_those_who_ask(self):
        said = self.counts(1, 0, 0)
        _, lines = self.ran(main=said, test=said, newest=self.counts(0, 1, 0))
        self.assertEqual(lines[-1], "2 passed, 0 failed, 0 skipped", lines)
        xml = (
            '<testsuite><testcase classname="a.test_contracts" name="test_b"/>'
            '<testcase classname="a.test_contracts" name="test_c[x]">'
            '<failure message="contract.BrokenContract: It is so. This affects all."/></testcase>'
            '<testcase classname="d.E" name="test_f"><failure message="no"/></testcase></testsuite>'
        )
        broken = f"""echo 'torch 9.1.0'; echo '{xml}' > "$CI_JUNIT"; {self.counts(1, 2, 0)}; false"""
        code, lines = self.ran("newest", newest=broken)
        self.assertEqual((code, lines[-1]), (1, "1 passed, 2 failed, 0 skipped"), lines)
        row = (self.out / "newest.row").read_text()
        self.assertRegex(row, r"^\| 9\.1\.0 \| 3\.\d+ \| broken: test_c\[x\], \d{4}-\d\d-\d\d; .* 1 fail \|$")
        self.assertIn(
            "- `a.test_contracts.test_c[x]`: It is so. This affects all.", (self.out / "newest.md").read_text()
        )
        one = xml.partition("/>")[0]
        good = f"""echo 'torch 9.1.0'; echo '{one}/></testsuite>' > "$CI_JUNIT"; {said}"""
        self.ran("newest", newest=good)
        self.assertFalse((self.out / "newest.md").exists())
        self.assertIn("| all hold, ", (self.out / "newest.row").read_text())
        skipped = f"""echo 'torch 9.1.0'; echo '{one}><skipped/></testcase></testsuite>' > "$CI_JUNIT"; {said}"""
        self.ran("newest", newest=skipped)
        self.assertIn("| none was tried, ", (self.out / "newest.row").read_text())
        self.assertTrue((self.out / "newest.md").exists())

    def test_a_pre_release_of_torch_alone(self):
        for pre, wanted in (("", ">=9.1"), ("1", ">=9.1.dev0")):
            with mock.patch.dict(os.environ, CI_PRE=pre):
                (self.project / ".ci" / "newest.txt").write_text("# The newest.\ntorch>=9.1\n")
                _, lines = self.ran("newest", newest=f'cat "$PIP_CONSTRAINT"; {self.counts(1, 0, 0)}')
            self.assertIn(f"torch{wanted}", lines)
            self.assertIn("# The newest.", lines)

    def test_a_newest_torch_with_which_nothing_runs(self):
        self.ran("newest", newest="false")
        self.assertIn("no test ran", (self.out / "newest.row").read_text())
        self.assertTrue((self.out / "newest.md").exists())

    def test_a_command_of_several_lines(self):
        """To its last line, and without what follows in the page."""
        newest = f"false \\\n    || true \\\n    && {self.counts(3, 0, 0)}\n```\n\n```\nfalse"
        code, lines = self.ran("newest", newest=newest)
        self.assertEqual((code, lines[-1]), (0, "3 passed, 0 failed, 0 skipped"), lines)

    def test_a_part_that_has_no_command_is_a_failure(self):
        code, lines = self.ran(main=self.counts(1, 0, 0), test=self.counts(1, 0, 0), contributing="no command")
        self.assertEqual((code, lines[-1]), (1, "2 passed, 2 failed, 0 skipped"), lines)

    def test_slow_without_test_makes_its_environment(self):
        make = "mkdir -p .venv/bin && printf '#!/bin/sh\\n' > .venv/bin/pip"
        python3 = f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n'
        (self.tools / "python3").write_text(f"{python3}{make}\n")
        (self.tools / "python3").chmod(0o755)
        slow = f"ls .venv/bin && {self.counts(1, 0, 0)}"
        code, lines = self.ran("slow", slow=slow)
        self.assertEqual(code, 1, lines)  # that pip cannot be executed
        self.assertNotIn("1 passed, 0 failed, 0 skipped", lines)
        (self.tools / "python3").write_text(f"{python3}{make} && chmod +x .venv/bin/pip\n")
        code, lines = self.ran("slow", slow=slow)
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"), lines)

    def test_failures_are_shown_again_at_the_end(self):
        xml = '<testsuite><testcase classname="a.B" name="test_c"><failure>the cause</failure></testcase></testsuite>'
        bad = f"""echo '{xml}' > "$TORCH_TESTING_EXT_RUN_JUNITXML"; {self.counts(4, 1, 1)}; false"""
        _, lines = self.ran(main=bad, test=self.counts(3, 0, 0), slow="echo it broke; false")
        at = lines.index("+ [main] 1 failed:")
        shown = [
            "+ [main] 1 failed:",
            "  a.B.test_c",
            "+ [main] the end of a.B.test_c:",
            "the cause",
            "+ [slow] failed without a failed test; the end of its log:",
            "it broke",
            "7 passed, 2 failed, 1 skipped",
        ]
        self.assertEqual(lines[at:], shown)
        # What an earlier run has left is not shown.
        _, lines = self.ran("main", main="false")
        self.assertEqual(lines[-2], "+ [main] failed without a failed test; the end of its log:")

    def test_the_part_test_limits_what_its_tests_cost(self):
        said = f'echo "limit:$CI_CPU_LIMIT"; {self.counts(1, 0, 0)}'
        _, lines = self.ran(main=said, test=said, slow=said)
        self.assertEqual([line for line in lines if line.startswith("limit:")], ["limit:", "limit:2", "limit:"])

    def test_each_part_has_its_folder_and_its_versions(self):
        said = 'echo "$PIP_CONSTRAINT|$TORCH_TESTING_EXT_RUN_JUNITXML|$CI_JUNIT" && touch made && ls'
        self.ran("main", "test", main=said, test=said)
        main, test = ((self.out / f"{name}.log").read_text().splitlines() for name in ("main", "test"))
        constraints, newest = (self.project / ".ci" / f"{name}.txt" for name in ("constraints", "newest"))
        self.assertEqual(main, [f"{newest}|{self.out}/main.xml|", "CONTRIBUTING.md", "README.md", "made"])
        self.assertEqual(test, [f"{constraints}||{self.out}/test.xml", "CONTRIBUTING.md", "README.md", "made"])

    def test_a_run_keeps_durations(self):
        """test/conftest.py has pytest write them where CI_JUNIT says, but not the runs that tests start."""
        (self.project / "test_it.py").write_text("import os\nassert 'CI_JUNIT' not in os.environ\n")
        for file in (ROOT / "test").glob("*.py"):
            (self.project / file.name).write_bytes(file.read_bytes())
        environ = {**os.environ, "CI_JUNIT": str(self.project / "it.xml")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "test_it.py"]
        subprocess.run(command, env=environ, cwd=self.project, stdout=subprocess.DEVNULL)
        self.assertIn('errors="0"', (self.project / "it.xml").read_text())


class FailuresTest(unittest.TestCase):
    """.ci/failures.py, which .ci/run calls."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = Path(folder.name)

    def write(self, part, *cases):
        """A JUnit XML with these cases, each a dict of attributes and the elements in it: tags and texts."""
        suite = ET.Element("testsuite")
        for attributes, elements in cases:
            case = ET.SubElement(suite, "testcase", attributes)
            for tag, text in elements.items():
                ET.SubElement(case, tag, message="in short").text = text
        ET.ElementTree(suite).write(self.results / f"{part}.xml")

    def failed(self, name, text):
        return ({"classname": "test.torch_testing_ext.test_ci.SomeTest", "name": name}, {"failure": text})

    def described(self, *parts):
        lines = failures.describe(self.results, parts)
        self.assertLessEqual(sum(len(line) + 1 for line in lines), failures.LIMIT + failures.LINE_WIDTH)
        return lines

    def test_names(self):
        here, folder = "test/torch_testing_ext/test_ci.py", "torch_testing_ext"
        for classname, name, expected in (
            (f"test.{folder}.test_ci.SomeTest", "test_a[1]", f"{here}::SomeTest::test_a[1]"),
            (f"{folder}.test_ci.SomeTest", "test_a", f"{here}::SomeTest::test_a"),
            (f"test.{folder}.test_ci", "test_a", f"{here}::test_a"),
            ("", f"test.{folder}.test_ci", f"test.{folder}.test_ci"),
            ("gone.A", "test_a", "gone.A.test_a"),
        ):
            self.assertEqual(failures.test_name(classname, name), expected)

    def test_only_what_failed(self):
        tests = {"failure": "a", "error": "b", "skipped": "c", "rerunFailure": "d", "flakyFailure": "e"}
        self.write("test", *(({"name": tag}, {tag: text}) for tag, text in tests.items()), ({"name": "passed"}, {}))
        self.assertEqual(
            [case.title for case in failures.failed_tests(self.results / "test.xml")], ["failure", "error"]
        )
        both = {"failure": "in the test", "error": "in the tear-down"}
        self.write("slow", ({"name": "both"}, both), ({"name": "empty"}, {"failure": ""}))
        texts = [case.text for case in failures.failed_tests(self.results / "slow.xml")]
        self.assertEqual(texts, ["in the test\nin the tear-down", "in short"])

    def test_the_end_of_a_failure(self):
        self.write("test", self.failed("test_a", "\n".join(f"line {number}" for number in range(100))))
        name = "test/torch_testing_ext/test_ci.py::SomeTest::test_a"
        ending = [f"line {number}" for number in range(75, 100)]
        lines = ["+ [test] 1 failed:", f"  {name}", f"+ [test] the end of {name}:", *ending]
        self.assertEqual(self.described("test"), lines)

    def test_many_long_failures(self):
        long = "\n".join(f"{number} {'x' * 300}" for number in range(100))
        for count in (2, 10, 500):
            with self.subTest(count):
                self.write("test", *(self.failed(f"test_{number}", long) for number in range(count)))
                lines = self.described("test")
                self.assertEqual(lines[0], f"+ [test] {count} failed:")
                self.assertIn("SomeTest::test_0", lines[1])
                ends = [line for line in lines if "the end of" in line]
                self.assertGreaterEqual(len(ends), min(count, 10))
                self.assertTrue(any(line.startswith("99 xxx") for line in lines))
        self.assertRegex(lines[-1], r"^\+ 4\d\d more: see ")
        self.assertTrue(any(line.startswith("  and ") for line in lines))

    def test_what_short_failures_leave_is_for_long_ones(self):
        long = "\n".join("x" * 180 for _ in range(20))
        self.write("test", *(self.failed(f"test_{number}", "short") for number in range(10)), self.failed("long", long))
        self.assertEqual(sum(line == "x" * 180 for line in self.described("test")), 20)

    def test_a_part_without_a_failed_test(self):
        (self.results / "lint.log").write_text("one\ntwo\n")
        self.write("slow", ({"name": "passed"}, {}))
        (self.results / "slow.log").write_text("too costly\n")
        (self.results / "test.xml").write_text("<testsuite><testcase")
        lines = self.described("lint", "slow", "test")
        self.assertEqual([*lines[1:3], lines[4]], ["one", "two", "too costly"])
        self.assertEqual([line[2:8] for line in lines if line.startswith("+")], ["[lint]", "[slow]", "[test]"])


if __name__ == "__main__":
    unittest.main()
