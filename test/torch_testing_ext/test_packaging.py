"""The package as others get it: what the sdist and the wheel hold, and the wheel in a project that is not ours."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from email import message_from_bytes
from pathlib import Path

import yaml

import torch_testing_ext
from torch_testing_ext.launch import settings
from torch_testing_ext.runner.options import config

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11; pytest brings the same as a package
    import tomli as tomllib

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "use-it.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEST = """
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase

class SumTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_right(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        dist.destroy_process_group()

    def test_wrong(self):
        self.assertEqual(self.rank, 0)
"""


def python(*words, cwd, **environ):
    """Run this interpreter without the settings of the run that this test is in."""
    ours = (settings.PREFIX, "PYTEST_", "PYTHONPATH", "COV_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={**inherited, **environ}, capture_output=True, text=True)


class PackageTest(unittest.TestCase):
    """Builds the sdist from a copy of the project, and the wheel from the sdist, both without a network."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder, copy = Path(folder.name), Path(folder.name, "copy")
        unwanted = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=unwanted)
        with tarfile.open(cls.build("sdist", copy)) as archive:
            archive.extractall(cls.folder)
        cls.sdist = cls.folder / f"torch_testing_ext-{torch_testing_ext.__version__}"
        cls.in_sdist = cls.files(cls.sdist)
        cls.installed = cls.folder / "installed"
        with zipfile.ZipFile(cls.build("wheel", cls.sdist)) as archive:
            archive.extractall(cls.installed)
        cls.facts = next(cls.installed.glob("*.dist-info"))

    @classmethod
    def build(cls, kind, source):
        """Build as pip and build do, by the backend; the last line that it prints is the name of the archive."""
        backend = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(cls.folder)!r}))"
        done = python("-c", backend, cwd=source)
        assert done.returncode == 0, done.stdout + done.stderr
        return cls.folder / done.stdout.splitlines()[-1]

    @staticmethod
    def files(folder):
        """The files below a folder, but for those that Python adds when it imports some."""
        files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        return {name for name in files if "__pycache__" not in name}

    def test_the_wheel_holds_the_package_and_nothing_else(self):
        ours = self.files(ROOT / "torch_testing_ext")
        self.assertIn("py.typed", ours)
        self.assertIn("runner/report/page/page.js", ours)
        expected = {f"torch_testing_ext/{name}" for name in ours}
        facts = {f"{self.facts.name}/{name}" for name in self.files(self.facts)}
        self.assertEqual(self.files(self.installed), expected | facts)
        self.assertIn(f"{self.facts.name}/licenses/LICENSE", facts)

    def test_the_sdist_holds_what_builds_the_wheel(self):
        self.assertLessEqual({"LICENSE", "README.md", "pyproject.toml", "setup.py"}, self.in_sdist)
        folders = {name.partition("/")[0] for name in self.in_sdist if name.endswith(".py")}
        self.assertEqual(folders, {"torch_testing_ext", "setup.py"})

    def test_the_metadata(self):
        facts = message_from_bytes((self.facts / "METADATA").read_bytes())
        self.assertEqual(facts["Version"], torch_testing_ext.__version__)
        always = [name for name in facts.get_all("Requires-Dist") if "extra" not in name]
        self.assertEqual([re.match(r"\w+", name)[0] for name in always], ["torch", "expecttest", "hypothesis", "numpy"])
        self.assertIn("[pytest11]\ntorch_testing_ext.pytest_plugin", (self.facts / "entry_points.txt").read_text())

    def test_a_project_that_is_not_ours(self):
        """The configuration of docs/use-it.md, the command of its example for CI, and what GitHub shows."""
        project = self.folder / "theirs"
        (project / "tests").mkdir(parents=True)
        (project / "tests" / "test_sum.py").write_text(TEST)
        blocks = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
        (project / "pyproject.toml").write_text(blocks["toml"])
        self.assertIn("torch_testing_ext", tomllib.loads(blocks["toml"])["tool"])
        steps = yaml.safe_load(blocks["yaml"])["jobs"]["test"]["steps"]
        (command,) = (step["run"] for step in steps if "torch_testing_ext.runner" in step.get("run", ""))
        environ = {"PYTHONPATH": str(self.installed), "GITHUB_ACTIONS": "true"}
        done = python(*command.split()[1:], cwd=project, **environ)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertEqual(done.stdout.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        self.assertRegex(
            done.stdout, r"(?m)^::error file=tests/test_sum\.py,line=16,title=failed%3A .*test_wrong::rank 1 of 2"
        )
        self.assertIn("\n  python -m torch_testing_ext.runner tests/test_sum.py::SumTest::test_wrong", done.stdout)
        (upload,) = (step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", ""))
        reports = [project / name for name in upload.split()]
        self.assertTrue(all(file.stat().st_size for file in reports), reports)
        self.assertIn(str(self.installed), (project / "report.xml").read_text())


class ProjectFilesTest(unittest.TestCase):
    def test_workflows_and_settings_of_github_are_yaml(self):
        files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
        self.assertGreater(len(files), 4)
        for file in files:
            self.assertIsInstance(yaml.safe_load(file.read_text()), dict, file)

    def test_the_jobs_of_ci_run_existing_parts(self):
        known = {"main", "test", "slow", "lint"}
        named = [re.findall(r"bash \.ci/run(.*)", file.read_text()) for file in (ROOT / ".github").rglob("*.yml")]
        parts = {part for commands in named for command in commands for part in command.split()}
        self.assertEqual(parts, known)

    def test_every_supported_torch_is_tested_each_night(self):
        jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]
        tested = {each["torch"] for each in jobs["everything"]["strategy"]["matrix"]["include"]}
        oldest, newest = re.search(r"torch 2\.(\d+) to 2\.(\d+)", (ROOT / "README.md").read_text()).groups()
        self.assertEqual(tested, {f"2.{minor}" for minor in range(int(oldest), int(newest) + 1)})

    def test_the_oldest_versions_are_those_of_pyproject(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        needs = [need for extra in project["optional-dependencies"].values() for need in extra]
        floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join([*project["dependencies"], *needs]), re.MULTILINE))
        tested = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci/oldest.txt").read_text(), re.MULTILINE))
        for name in ("pytest", "hypothesis", "ray", "rich", "libcst"):
            self.assertTrue(tested[name].startswith(floors[name]), (name, tested[name], floors[name]))

    def test_options_of_the_page_exist(self):
        text = PAGE.read_text(encoding="utf-8")
        commands = re.findall(r"python -m torch_testing_ext\.runner(.*)", text)
        self.assertGreater(len(commands), 1)
        for command in commands:
            config.read_options(command.split("`")[0].split(), {}, ROOT, ROOT)


if __name__ == "__main__":
    unittest.main()
