"""`torchtest init` in projects of several kinds: what it finds, writes and leaves alone."""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import unittest
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import yaml
from kit.files import FolderCase
from kit.processes import ROOT

from torch_testing_ext.runner import init_project
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.run_files.known_holes import read_known_holes


class InitTest(FolderCase):
    distribution = None

    def init(self, *argv, broken=(), address=""):
        """Set the project up, with a runner that knows one test of each file. Returns what was printed, and run.

        `address`: with which this package was built.
        """
        ran = []

        def main(argv, root):
            if argv[0] != "--list=json":
                ran.append(argv)
                return 0
            if argv[-1] in broken:
                return 1
            print(json.dumps({"tests": [{"id": f"{argv[-1]}::T::test_it"}]}))
            return 0

        out = io.StringIO()
        built = SimpleNamespace(read_text=lambda name: '{"url": "file:///kit.whl"}', metadata=Message())
        if address:
            built.metadata["Project-URL"] = f"Source, {address}"
        with (
            contextlib.redirect_stdout(out),
            mock.patch("importlib.metadata.distribution", self.distribution or (lambda name: built)),
        ):
            self.assertEqual(init_project.init(argv, self.root, main), 0)
        return out.getvalue(), ran

    def read(self, name):
        return (self.root / name).read_text(encoding="utf-8")

    def test_settings_in_another_spelling_are_kept(self):
        self.write("mytests/test_a.py", "")
        for settings in ("[ tool . torch_testing_ext ]\ntests = ['mytests']\n", "tool.torch_testing_ext.jobs = 1\n"):
            self.write("pyproject.toml", settings)
            out, _ = self.init()
            self.assertIn("kept   pyproject.toml: it has settings of torch_testing_ext", out)
            self.assertEqual(self.read("pyproject.toml"), settings)

    def test_a_page_for_programs(self):
        """An existing one stays as it is: what to add is printed."""
        out, ran = self.init("--agents")
        self.assertEqual((out, ran), ("wrote  AGENTS.md\n", []))
        page = self.read("AGENTS.md")
        self.assertLessEqual(page.count("\n"), 40)
        self.assertIn("`torchtest show --json TEST`", page)
        self.assertEqual([path.name for path in self.root.iterdir()], ["AGENTS.md"])
        self.assertEqual(self.init("--agents")[0], "kept   AGENTS.md\n")
        self.write("AGENTS.md", "ours\n")
        out, _ = self.init("--agents")
        self.assertEqual((out, self.read("AGENTS.md")), (f"kept   AGENTS.md\n\nTo add to it:\n\n{page}", "ours\n"))

    def test_what_cannot_be_written(self):
        self.write("test_a.py", ""), self.write(".github", "a file")
        with self.assertRaisesRegex(UsageError, "init: .*Not a directory"):
            self.init(address="https://example.org/kit")
        (self.root / "pyproject.toml").write_bytes(b"# caf\xe9\n")
        with self.assertRaisesRegex(UsageError, "init: .*codec can't decode"):
            self.init()

    def test_a_project_with_tests(self):
        self.write("checks/test_a.py", ""), self.write("checks/deep/test_b.py", ""), self.write("more/test_c.py", "")
        self.write("venv/pyvenv.cfg", ""), self.write("venv/lib/test_x.py", ""), self.write(".hidden/test_y.py", "")
        self.write("pyproject.toml", '[project]\nname = "theirs"')
        out, ran = self.init(broken=["checks/deep/test_b.py"], address="https://example.org/kit")
        self.assertEqual(
            self.read("pyproject.toml"),
            '[project]\nname = "theirs"\n\n[tool.torch_testing_ext]\ntests = ["checks", "more"]\n',
        )
        self.assertEqual(ran, [["checks/test_a.py::T::test_it"]])
        self.assertIn(" checks/test_a.py::T::test_it\n", out)
        job = self.read(".github/workflows/torchtest.yml")
        kit = "'torch-testing-ext[pytest] @ git+https://example.org/kit'"
        self.assertIn(f"      - run: uv pip install . {kit}\n", job)

        self.write(".github/workflows/torchtest.yml", "mine")
        again, _ = self.init()
        self.assertEqual(self.read(".github/workflows/torchtest.yml"), "mine")
        self.assertEqual(self.read("pyproject.toml").count("[tool.torch_testing_ext]"), 1)
        self.assertNotIn("wrote", again)

    def test_the_usual_folders_come_first(self):
        self.write("tests/test_a.py", ""), self.write("elsewhere/test_b.py", "")
        self.init()
        self.assertEqual(self.read("pyproject.toml"), '[tool.torch_testing_ext]\ntests = ["tests"]\n')

    def test_a_project_without_tests(self):
        out, ran = self.init()
        self.assertIn("@pytest.mark.world_size(2)", self.read("tests/test_first.py"))
        self.assertEqual(ran, [["tests/test_first.py::T::test_it"]])
        self.assertIn("wrote  tests/test_first.py", out)

    def test_how_the_job_installs_the_kit(self):
        kit = "torch-testing-ext[pytest]"
        git = {"url": "https://example.org/kit", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
        for origin, requirement in (
            (git, f"{kit} @ git+https://example.org/kit@abc"),
            ({"url": "https://example.org/kit.whl", "archive_info": {}}, f"{kit} @ https://example.org/kit.whl"),
            # From an index.
            (None, f"{kit}==1.2"),
        ):
            with self.subTest(origin), tempfile.TemporaryDirectory() as folder:
                self.root = Path(folder)
                text = json.dumps(origin) if origin else None
                found = SimpleNamespace(read_text=lambda name, text=text: text, version="1.2")
                self.distribution = lambda name, found=found: found
                out, _ = self.init()
                self.assertIn(f"uv pip install '{requirement}'\n", self.read(".github/workflows/torchtest.yml"))
                self.assertIn("wrote  .github/workflows/torchtest.yml", out)

    def test_the_job_is_for_the_python_and_the_machine(self):
        self.init(address="https://example.org/kit")
        (job,) = yaml.safe_load(self.read(".github/workflows/torchtest.yml"))["jobs"].values()
        self.assertEqual((job["runs-on"], job["env"]), ("ubuntu-latest", {"UV_TORCH_BACKEND": "cpu"}))
        (uv,) = (step["with"] for step in job["steps"] if step.get("uses", "").startswith("astral-sh/setup-uv@"))
        python = ".".join(map(str, sys.version_info[:2]))
        self.assertEqual(uv, {"python-version": python, "enable-cache": True, "activate-environment": True})

    def test_the_page_shows_the_job(self):
        self.write("requirements.txt", "torch-testing-ext\n")
        self.init()
        shown = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/get-started/ci.md").read_text(), re.DOTALL)[1]
        python = "python-version: "
        same_python = re.sub(f"{python}.*", f'{python}"3.12"', self.read(".github/workflows/torchtest.yml"))
        self.assertEqual(same_python, shown)

    def test_no_job_that_somebody_would_have_to_edit(self):
        out, _ = self.init()
        self.assertIn("no job .github/workflows/torchtest.yml: torch-testing-ext was installed from a file", out)
        self.assertFalse((self.root / ".github").exists())
        self.write("requirements.txt", "torch-testing-ext[ui,pytest] @ git+https://example.org/own\n")
        self.init()
        job = self.read(".github/workflows/torchtest.yml")
        self.assertEqual(job.count("pip install"), 1)
        self.assertIn("      - run: uv pip install -r requirements.txt pytest\n", job)

    def test_a_project_that_requires_the_kit(self):
        extra = '[project]\nname = "x"\n[project.optional-dependencies]\ntest = ["torch.testing_ext[ui]>=0.1"]\n'
        groups = '[project]\nname = "x"\n[dependency-groups]\ndev = ["torch-testing-ext", {include-group = "a"}]\n'
        for files, installed in (
            ({"pyproject.toml": extra}, "'.[test]' pytest"),
            ({"pyproject.toml": groups}, ". --group dev pytest"),
            (
                {"pyproject.toml": '[project]\ndependencies = ["Torch_Testing_Ext @ git+https://example.org"]'},
                ". pytest",
            ),
            ({"pyproject.toml": '[tool.poetry]\n[tool.poetry.dependencies]\ntorch-testing-ext = "*"'}, ". pytest"),
            ({"setup.py": "setup(install_requires=['torch-testing-ext'])"}, ". pytest"),
            ({"setup.py": "", "setup.cfg": "[options.extras_require]\nci =\n  torch-testing-ext\n"}, "'.[ci]' pytest"),
            ({"setup.py": "setup(extras_require={'ci': ['torch-testing-ext']})"}, None),
            ({"requirements.txt": "torch-testing-extras\n# torch-testing-ext\n"}, None),
            ({"pyproject.toml": '[project]\ndescription = "torch-testing-ext"\n# torch-testing-ext'}, None),
        ):
            with self.subTest(files), tempfile.TemporaryDirectory() as folder:
                self.root = Path(folder)
                self.write("tests/test_a.py", "")
                for name, text in files.items():
                    self.write(name, text)
                out, _ = self.init()
                if installed is None:
                    self.assertIn("no job .github", out)
                    continue
                job = self.read(".github/workflows/torchtest.yml")
                self.assertEqual(re.findall(r"run: uv pip install (.*)", job), [installed])

    def test_arguments(self):
        out, ran = self.init("--help")
        self.assertIn("init [--agents | --ci [github|gitlab|buildkite]]\n\nSet up the project", out)
        self.assertEqual((ran, os.listdir(self.root)), ([], []))
        for words in (["x"], ["--ci", "x"], ["--ci=x"], ["--ci", "gitlab", "x"], ["--agents", "x"]):
            with self.subTest(words), self.assertRaisesRegex(UsageError, "init has no argument but .*: leave out x"):
                self.init(*words)

    def test_jobs_for_the_service_that_the_project_uses(self):
        self.write("requirements.txt", "torch-testing-ext\n")
        for service, file, beside in (
            ("github", ".github/workflows/torchtest.yml", "README.md"),
            ("gitlab", ".gitlab-ci.yml", ".gitlab-ci.yml"),
            ("buildkite", ".buildkite/pipeline.yml", ".buildkite/other.yml"),
        ):
            with self.subTest(service):
                self.write(beside, "mine")
                out, ran = self.init("--ci")
                self.assertEqual(ran, [])
                if beside == file:
                    self.assertEqual(self.read(file), "mine")
                    self.assertIn("torchtest census all.ttx --known known-holes.txt --max-new 0", out)
                else:
                    self.assertIn("torchtest census all.ttx", self.read(file))
                self.assertEqual(read_known_holes(self.root / "known-holes.txt"), ())
                (self.root / beside).unlink()


if __name__ == "__main__":
    unittest.main()
