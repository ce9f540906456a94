"""The jobs that `torchtest init --ci` writes: their commands run in a shell, as each service would run them."""

import contextlib
import io
import os
import subprocess
import sys
import unittest
from unittest import mock

import pytest
import yaml
from kit.files import FolderCase
from kit.processes import ROOT

from torch_testing_ext.runner import init_project

TESTS = """
import unittest

class T(unittest.TestCase):
    def test_a(self): pass
    def test_b(self): pass
    def test_c(self): pass
"""
FAILS = "    def test_d(self): assert 1 == 2\n"
SKIPS = "    @unittest.skip('never')\n    def test_e(self): pass\n"


class CiJobsTest(FolderCase):
    def setUp(self):
        super().setUp()
        self.write("tests/test_x.py", f"{TESTS}{FAILS}{SKIPS}")
        self.write("requirements.txt", "torch-testing-ext\n")
        # In place of what the services and pip have.
        for name, script in {
            "torchtest": f'exec {sys.executable} -m torch_testing_ext "$@"',
            "pip": "exit 0",
            "uv": "exit 0",
            "buildkite-agent": 'if [ "$1" = annotate ]; then cat > annotation; fi',
        }.items():
            self.write(f"bin/{name}", f"#!/bin/sh\n{script}\n").chmod(0o755)

    def jobs(self, service):
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(init_project.init(["--ci", service], self.root, mock.Mock()), 0)
        return yaml.safe_load((self.root / init_project._SERVICES[service]).read_text())

    def shell(self, script, **variables):
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
        environ.pop("GITHUB_ACTIONS", None)
        done = subprocess.run(["bash", "-e", "-c", script], cwd=self.root, env=environ, capture_output=True, text=True)
        self.said = done.stdout + done.stderr
        return done.returncode

    def github(self):
        jobs = self.jobs("github")["jobs"]
        shards = jobs["test"]["strategy"]["matrix"]["shard"]
        self.assertEqual(jobs["report"]["needs"], "test")
        codes = []
        for shard in shards:
            for step in jobs["test"]["steps"]:
                if "run" in step:
                    codes.append(self.shell(step["run"].replace("${{ matrix.shard }}", str(shard))))
        summary = self.root / "step-summary"
        for step in jobs["report"]["steps"]:
            # A step after one that failed runs if it says so.
            if "run" in step and (step.get("if") == "always()" or not any(codes[2 * len(shards) :])):
                codes.append(self.shell(step["run"], GITHUB_STEP_SUMMARY=str(summary)))
        return any(codes), summary.read_text()

    def gitlab(self):
        jobs = self.jobs("gitlab")
        tests, report = jobs["tests"], jobs["test report"]
        self.assertEqual((tests["artifacts"]["when"], report["when"], report["needs"]), ("always", "always", ["tests"]))
        number = tests["parallel"]
        script = "\n".join([*jobs[".torchtest"]["before_script"], *tests["script"]])
        codes = [
            self.shell(script, CI_NODE_INDEX=str(index), CI_NODE_TOTAL=str(number)) for index in range(1, number + 1)
        ]
        codes.append(self.shell("\n".join(report["script"])))
        return any(codes), self.said

    def buildkite(self):
        tests, wait, report = self.jobs("buildkite")["steps"]
        self.assertTrue(wait["continue_on_failure"])
        # Buildkite makes one $ of two.
        script = "\n".join(tests["command"]).replace("$$", "$")
        number = tests["parallelism"]
        codes = [
            self.shell(script, BUILDKITE_PARALLEL_JOB=str(index), BUILDKITE_PARALLEL_JOB_COUNT=str(number))
            for index in range(number)
        ]
        codes.append(self.shell("\n".join(report["command"]).replace("$$", "$")))
        return any(codes), (self.root / "annotation").read_text()

    def check(self, service):
        """A failure and a test that never runs are both told; then the one is mended, and the other known."""
        failed, told = service()
        self.assertTrue(failed)
        self.assertIn("3 passed, 1 failed, 1 skipped", told)
        self.assertIn("1 of 5 tests not seen running in 3 runs", told)
        for name in ("all.ttx", "report.html", "report.xml"):
            self.assertTrue((self.root / name).exists())
        self.write("tests/test_x.py", f"{TESTS}{SKIPS}")
        with (self.root / "known-holes.txt").open("a") as file:
            file.write("2999-01-31  tests/test_x.py::T::test_e  it is old\n")
        failed, told = service()
        self.assertFalse(failed, told)
        self.assertIn("3 passed, 0 failed, 1 skipped", told)

    @pytest.mark.slow
    def test_github(self):
        self.check(self.github)

    @pytest.mark.slow
    def test_gitlab(self):
        self.check(self.gitlab)

    @pytest.mark.slow
    def test_buildkite(self):
        self.check(self.buildkite)


if __name__ == "__main__":
    unittest.main()
