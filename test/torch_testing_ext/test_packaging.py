"""The package as others get it: what the sdist and the wheel hold, and the wheel in a project that is not ours."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import unittest
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from kit.files import subject
from kit.source_copy import copy_source

import torch_testing_ext
from torch_testing_ext._process import setting_names

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11; pytest brings the same as a package
    import tomli as tomllib

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "get-started" / name for name in ("install.md", "ci.md")]
ADDRESS = "https://github.com/someone/project"
SITE = "https://someone.example.org/kit"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEST = subject(__file__, "sum_of_ranks.py")


def python(*words, cwd, **environ):
    return shell(shlex.join([sys.executable, *map(str, words)]), cwd, **environ)


def shell(command, cwd, **environ):
    """Run a command without the settings of the run that this test is in."""
    ours = (setting_names.PREFIX, "PYTEST_", "PYTHONPATH", "COV_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=cwd, env={**inherited, **environ}, capture_output=True, text=True
    )


class PackageTest(unittest.TestCase):
    """Builds the sdist from a copy of the project, and the wheel from the sdist, both without a network."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder, copy = Path(folder.name), Path(folder.name, "copy")
        copy_source(ROOT, copy)
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
        # The wheel has the addresses from the sdist.
        given = {"GITHUB_REPOSITORY": "someone/project", "SITE_URL": f"{SITE}/"} if kind == "sdist" else {}
        given["SOURCE_DATE_EPOCH"] = "1700000000"
        done = python("-c", backend, cwd=source, **{"GITHUB_REPOSITORY": "", "SITE_URL": "", **given})
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
        expected.add("torch_testing_ext_points.py")
        self.assertEqual(self.files(self.installed), expected | facts)
        self.assertIn(f"{self.facts.name}/licenses/LICENSE", facts)

    def test_the_sdist_holds_all_that_git_does(self):
        """So that whoever has it can run the tests and make the documents."""
        command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
        known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        missing = {name for name in known if (ROOT / name).is_file()} - self.in_sdist
        self.assertEqual(missing, set())
        self.assertTrue((self.sdist / "test/torch_testing_ext/launch/kit").is_symlink())

    @pytest.mark.slow
    def test_the_same_files_give_the_same_bytes(self):
        """At any time, from any folder, for any user."""
        (built,) = self.folder.glob("*.tar.gz")
        first, (wheel,) = built.read_bytes(), (file.read_bytes() for file in self.folder.glob("*.whl"))
        copy = self.folder / "another"
        copy_source(ROOT, copy)
        for file in (copy / "torch_testing_ext").glob("*.py"):
            file.chmod(0o600)
            os.utime(file, (0, 0))
        self.assertEqual(self.build("sdist", copy).read_bytes(), first)
        self.assertEqual(self.build("wheel", self.sdist).read_bytes(), wheel)

    def test_the_metadata(self):
        facts = message_from_bytes((self.facts / "METADATA").read_bytes())
        self.assertEqual(facts["Version"], torch_testing_ext.__version__)
        always = [name for name in facts.get_all("Requires-Dist") if "extra" not in name]
        names = ["torch", "expecttest", "hypothesis", "numpy", "tomli"]
        self.assertEqual([re.match(r"\w+", name)[0] for name in always], names)
        entries = (self.facts / "entry_points.txt").read_text()
        self.assertIn("[pytest11]\ntorch_testing_ext.pytest_plugin = torch_testing_ext.pytest_plugin\n", entries)
        self.assertIn("[console_scripts]\ntorchtest = torch_testing_ext.runner.cli:console", entries)

    def test_what_is_left_to_those_who_take_no_dependencies(self):
        """The page names all that the package needs beside torch."""
        facts = message_from_bytes((self.facts / "METADATA").read_bytes())
        always = {re.match(r"\w+", name)[0] for name in facts.get_all("Requires-Dist") if ";" not in name}
        (named,) = re.findall(
            r"`--no-deps`.*?\ninstall `([\w ]+)` yourself", PAGES[0].read_text(encoding="utf-8"), re.DOTALL
        )
        self.assertEqual({*named.split()}, always - {"torch"})

    @pytest.mark.slow
    def test_a_nightly_torch_stays(self):
        """pip replaces neither a nightly build nor a build of one's own."""
        for version in ("2.99.0.dev20270101+cu140", "2.12.0a0+gitabcdef0"):
            with self.subTest(version), tempfile.TemporaryDirectory() as folder:
                facts = Path(folder, f"torch-{version}.dist-info")
                facts.mkdir()
                (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
                (wheel,) = self.folder.glob("*.whl")
                # CI's constraints would choose a torch.
                environ = {"PYTHONPATH": folder, "PIP_CONSTRAINT": ""}
                done = python("-m", "pip", "install", "--dry-run", "--no-index", wheel, cwd=folder, **environ)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn(f"({version})", done.stdout)
                self.assertNotRegex(done.stdout, r"Would install .*\btorch-\d")

    def test_the_description_leads_somewhere(self):
        """The wheel was built from the sdist, without the address; the sdist with it."""
        facts = message_from_bytes((self.facts / "METADATA").read_bytes())
        urls = dict(url.split(", ") for url in facts.get_all("Project-URL"))
        self.assertEqual(urls["Source"], ADDRESS)
        self.assertEqual(urls["Documentation"], SITE)
        self.assertEqual(set(urls), {"Source", "Documentation", "Changelog", "Issues"})
        text = facts.get_payload()
        self.assertIn(f'pip install pytest "torch-testing-ext[ui] @ git+{ADDRESS}"', text)
        self.assertIn(f"]({ADDRESS}/raw/HEAD/docs/pictures/", text)
        links = re.findall(r"\]\(([^)]+)\)", text)
        self.assertGreater(len(links), 20)
        for link in links:
            page = link.removeprefix(f"{ADDRESS}/blob/HEAD/").partition("#")[0]
            if link.startswith(f"{SITE}/"):
                page = link.removeprefix(f"{SITE}/").partition("#")[0].rstrip("/") + ".md"
            self.assertTrue(link.startswith("https://") and ((ROOT / page).exists() or page == link), link)
        self.assertIn(f"{SITE}/docs/help/performance/", links)

    @pytest.mark.slow
    def test_the_plugin_is_loaded_once(self):
        (self.folder / "test_it.py").write_text("def test_it(spawn): ...\n")
        for words in ((), ("-p", "torch_testing_ext.pytest_plugin")):
            with self.subTest(words):
                command = ("-m", "pytest", "-p", "no:asyncio", "--trace-config", "-W", "error", *words, "test_it.py")
                done = python(*command, cwd=self.folder, PYTHONPATH=str(self.installed), PYTEST_ADDOPTS="")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                names = re.findall(r"(?m)^ +(torch_testing_ext\S*?) *: /", done.stdout)
                self.assertEqual(names, ["torch_testing_ext.pytest_plugin"], done.stdout)

    @pytest.mark.slow
    def test_a_project_that_is_not_ours(self):
        """The configuration of the pages, the command of their example for CI, and what GitHub shows."""
        project = self.folder / "theirs"
        (project / "tests").mkdir(parents=True)
        (project / "tests" / "test_sum.py").write_text(TEST)
        blocks = dict(found for page in PAGES for found in BLOCK.findall(page.read_text(encoding="utf-8")))
        (project / "pyproject.toml").write_text(blocks["toml"])
        self.assertIn("torch_testing_ext", tomllib.loads(blocks["toml"])["tool"])
        steps = yaml.safe_load(blocks["yaml"])["jobs"]["test"]["steps"]
        (command,) = (step["run"] for step in steps if step.get("run", "").startswith("torchtest "))
        script = self.folder / "bin" / "torchtest"  # as pip makes it
        script.parent.mkdir()
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom torch_testing_ext.runner.cli import console\nsys.exit(console())\n"
        )
        script.chmod(0o755)
        path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
        environ = {"PYTHONPATH": str(self.installed), "GITHUB_ACTIONS": "true", "PATH": path}
        done = shell(command, cwd=project, **environ)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertEqual(done.stdout.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        self.assertRegex(
            done.stdout, r"(?m)^::error file=tests/test_sum\.py,line=18,title=failed%3A .*test_wrong::rank 1 of 2"
        )
        again = "torchtest tests/test_sum.py::SumTest::test_wrong"
        self.assertEqual(set(re.findall(r"(?m)^ +(torchtest tests/.*)$", done.stdout)), {again}, done.stdout)
        self.assertIn(again, (project / "report.html").read_text())
        alone = shell(again, cwd=project / "tests", **environ)
        self.assertEqual((alone.returncode, alone.stdout.splitlines()[-1]), (1, "0 passed, 1 failed, 0 skipped"))
        (upload,) = (step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", ""))
        reports = [project / name for name in upload.split()]
        self.assertTrue(all(file.stat().st_size for file in reports), reports)
        where = shell(
            f"{sys.executable} -c 'import torch_testing_ext; print(torch_testing_ext.__file__)'", cwd=project, **environ
        )
        self.assertEqual(Path(where.stdout.strip()).parents[1], self.installed)

    @pytest.mark.slow
    def test_warm_runs_in_an_environment_of_its_own(self):
        """Where no finder of an editable installation is, and none of its imports."""
        folder = self.folder / "environment"
        venv.create(folder, symlinks=True, with_pip=False)
        (site,) = folder.glob("lib/python*/site-packages")
        others = dict.fromkeys(entry for entry in sys.path if entry.endswith("-packages"))
        (site / "installed.pth").write_text("\n".join([str(self.installed), *others]))
        project, runtime = self.folder / "warm", self.folder / "runtime"
        for made in (project, runtime):
            made.mkdir()
        (project / "test_it.py").write_text(
            "import unittest, torch, torch_testing_ext\nclass ItTest(unittest.TestCase):\n    def test_it(self):\n"
            f"        self.assertIn({str(self.installed)!r}, torch_testing_ext.__file__)\n"
        )
        command = shlex.join([str(folder / "bin" / "python"), "-m", "torch_testing_ext"])
        self.addCleanup(shell, f"{command} --warm=off", cwd=project, XDG_RUNTIME_DIR=str(runtime))
        for _ in range(2):
            done = shell(f"{command} --warm", cwd=project, XDG_RUNTIME_DIR=str(runtime))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(", warm", done.stdout.splitlines()[0])


class ProjectFilesTest(unittest.TestCase):
    def test_workflows_and_settings_of_github_are_yaml(self):
        files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
        self.assertGreater(len(files), 4)
        for file in files:
            self.assertIsInstance(yaml.safe_load(file.read_text()), dict, file)

    def test_actions_are_pinned_by_hash(self):
        """A tag may be moved to other code; the comment says which version it is, for Dependabot and for people."""
        files = [*(ROOT / ".github/workflows").glob("*.yml")]
        used = [line for file in files for line in re.findall(r"uses: (.*)", file.read_text())]
        self.assertGreater(len(used), 20)
        for each in used:
            self.assertRegex(each, r"^[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")

    def test_no_job_keeps_the_credentials_of_its_checkout(self):
        """A test, or an artefact with the checkout, could pass them on."""
        workflows = [yaml.safe_load(file.read_text()) for file in (ROOT / ".github/workflows").glob("*.yml")]
        steps = [step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]]
        checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
        self.assertGreater(len(checkouts), 10)
        for step in checkouts:
            self.assertIs(step.get("with", {}).get("persist-credentials"), False)

    def test_a_release_is_attested_before_it_is_uploaded(self):
        jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
        self.assertEqual(jobs["upload"]["needs"], ["build", "attest"])
        self.assertEqual(jobs["upload"]["if"], "github.ref_type == 'tag'")
        rights = {name: set(job.get("permissions", {})) for name, job in jobs.items()}
        self.assertEqual(rights, {"build": set(), "attest": {"id-token", "attestations"}, "upload": {"id-token"}})

    def test_the_jobs_of_ci_run_existing_parts(self):
        known = {"main", "test", "slow", "nightly", "wheel", "lint", "newest", "floors", "release"}
        named = [re.findall(r"bash \.ci/run(.*)", file.read_text()) for file in (ROOT / ".github").rglob("*.yml")]
        parts = {part for commands in named for command in commands for part in command.split()}
        self.assertEqual(parts, known)

    def test_every_supported_torch_is_tested_each_night(self):
        jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]
        tested = {each["torch"] for each in jobs["everything"]["strategy"]["matrix"]["include"]}
        oldest, newest = re.search(r"torch 2\.(\d+) to 2\.(\d+)", (ROOT / "README.md").read_text()).groups()
        self.assertEqual(tested, {f"2.{minor}" for minor in range(int(oldest), int(newest) + 1)})

    def test_a_newcomer_gets_the_newest_supported_torch(self):
        newest = re.search(r"torch 2\.\d+ to (2\.\d+)", (ROOT / "README.md").read_text())[1]
        self.assertIn(f"torch>={newest}", (ROOT / ".ci/newest.txt").read_text().splitlines())

    def test_the_oldest_versions_are_those_of_pyproject(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        needs = [need for extra in project["optional-dependencies"].values() for need in extra]
        floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join([*project["dependencies"], *needs]), re.MULTILINE))
        tested = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci/oldest.txt").read_text(), re.MULTILINE))
        for name in ("torch", "pytest", "pytest-xdist", "hypothesis", "ray", "rich", "libcst", "junitparser"):
            self.assertTrue(tested[name].startswith(floors[name]), (name, tested[name], floors[name]))


if __name__ == "__main__":
    unittest.main()
