"""The checks of CI: .ci/run finds the README's commands, adds up their results, and fails if any part fails."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
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
        for name in ("run", "constraints.txt"):
            (self.project / ".ci" / name).write_bytes((ROOT / ".ci" / name).read_bytes())
        subprocess.run(["git", "init", "--quiet", self.project], check=True)
        self.tools.mkdir()
        (self.tools / "chromium").write_text("#!/bin/sh\n")  # or .ci/run installs it
        (self.tools / "chromium").chmod(0o755)

    def ran(self, *parts, lint=0, contributing="", **commands):
        """Run .ci/run and return its exit code and its lines."""
        if not contributing:
            commands.setdefault("full", self.counts(0, 0, 0))
            commands.setdefault("slow", self.counts(0, 0, 0))
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
        page = "<!-- command: {} -->\n```\n{}\n```\n"
        tiers = page.format("full", self.counts(500, 0, 1)) + page.format("slow", self.counts(30, 0, 300))
        code, lines = self.ran(main=self.counts(1, 0, 100), test=self.counts(2, 0, 0), contributing=tiers)
        self.assertEqual((code, lines[-1]), (0, "533 passed, 0 failed, 401 skipped"), lines)

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
            ({"main": good, "test": good, "full": bad}, "14 passed, 1 failed, 3 skipped"),
            ({"main": good, "test": good, "slow": "false"}, "10 passed, 1 failed, 2 skipped"),
            ({"main": good, "test": good, "slow": bad}, "14 passed, 1 failed, 3 skipped"),
        ):
            with self.subTest(**commands):
                code, lines = self.ran(**commands)
                self.assertEqual((code, lines[-1]), (1, last), lines)

    def test_the_last_line_of_a_part_counts(self):
        code, lines = self.ran("main", main=f"{self.counts(0, 7, 0)}; {self.counts(1, 0, 0)}")
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"), lines)

    def test_some_parts(self):
        code, lines = self.ran("test", main="false", test=self.counts(2, 0, 0), lint=1)
        self.assertEqual((code, lines[-1]), (0, "2 passed, 0 failed, 0 skipped"), lines)
        self.assertEqual(self.ran("tests")[0], 4)

    def test_a_part_that_has_no_command_is_a_failure(self):
        code, lines = self.ran(main=self.counts(1, 0, 0), test=self.counts(1, 0, 0), contributing="no command")
        self.assertEqual((code, lines[-1]), (1, "2 passed, 2 failed, 0 skipped"), lines)

    def test_slow_without_test_makes_its_environment(self):
        (self.tools / "python3").write_text("#!/bin/sh\nmkdir -p .venv/bin && printf '#!/bin/sh\\n' > .venv/bin/pip\n")
        (self.tools / "python3").chmod(0o755)
        slow = f"ls .venv/bin && {self.counts(1, 0, 0)}"
        code, lines = self.ran("slow", slow=slow)
        self.assertEqual(code, 1, lines)  # that pip cannot be executed
        self.assertNotIn("1 passed, 0 failed, 0 skipped", lines)
        (self.tools / "python3").write_text(
            "#!/bin/sh\nmkdir -p .venv/bin && printf '#!/bin/sh\\n' > .venv/bin/pip && chmod +x .venv/bin/pip\n"
        )
        code, lines = self.ran("slow", slow=slow)
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"), lines)

    def test_each_part_has_its_folder_and_its_versions(self):
        said = 'echo "$PIP_CONSTRAINT|$TORCH_TESTING_EXT_RUN_JUNIT|$CI_JUNIT" && touch made && ls'
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


if __name__ == "__main__":
    unittest.main()
