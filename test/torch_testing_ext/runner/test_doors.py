"""Reports and sites of other packages, which come in by entry points, as our own do."""

import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

from kit.files import FolderCase
from kit.invented_runs import every_outcome, run_events
from kit.processes import ROOT
from kit.runs import RunsCase

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner import doors
from torch_testing_ext.runner.opened_site import OWN_SITES
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import OWN_REPORTS, make_reporters

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = ROOT / "docs" / "contribute" / "write-a-report.md"
FILE = "test/distributed/test_x.py"
SIMPLE = """
import unittest
class T(unittest.TestCase):
    def test_a(self): pass
    def test_b(self): self.fail("on purpose")
"""
# This machine under another name, which counts how often it is opened.
SITE = """
from contextlib import contextmanager
from torch_testing_ext.runner.run_site import on_this_machine
@contextmanager
def here(options, root, files):
    print("opened", *files, flush=True)
    with on_this_machine(options, root, files) as site:
        yield site
"""


def examples():
    """The files of the page, by name."""
    return dict(re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE.read_text(), flags=re.DOTALL))


def entry_points(declared):
    """The text of entry_points.txt for a part of pyproject.toml."""
    groups = tomllib.loads(declared)["project"]["entry-points"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    return "\n".join(lines)


def install(folder, declared, **modules):
    """Write a package that is installed in a folder, as its metadata says."""
    metadata = Path(folder, "others-1.0.dist-info")
    metadata.mkdir(parents=True)
    Path(metadata, "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    Path(metadata, "entry_points.txt").write_text(entry_points(declared))
    for name, source in modules.items():
        Path(folder, f"{name}.py").write_text(source)


class EntriesTest(FolderCase):
    def setUp(self):
        super().setUp()
        path = mock.patch.object(sys, "path", [str(self.root), *sys.path])
        path.start()
        self.addCleanup(path.stop)

    def test_pyproject_declares_ours(self):
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        for group, own in ((doors.REPORTS, OWN_REPORTS), (doors.SITES, OWN_SITES)):
            self.assertEqual(declared[group], own)
            for entry in doors.entries(group, own).values():
                self.assertTrue(callable(entry.load()), entry)

    def test_those_of_others_come_after_ours_or_in_their_place(self):
        ours = list(doors.entries(doors.REPORTS, OWN_REPORTS))
        install(self.root, f'[project.entry-points."{doors.REPORTS}"]\nmine = "m:f"\nhtml = "m:page"')
        found = doors.entries(doors.REPORTS, OWN_REPORTS)
        self.assertEqual(list(found), [*ours, "mine"])
        self.assertEqual((found["html"].value, found["mine"].value), ("m:page", "m:f"))

    def test_a_report_that_cannot_be_made(self):
        """The others are made, and the run goes on."""
        source = "def breaks(request): raise LookupError('a mistake')\ndef refuses(request): return None\n"
        group = f'[project.entry-points."{doors.REPORTS}"]\n'
        declared = f'{group}gone = "no_such_module:f"\nbreaks = "reports_of_others:breaks"\n'
        install(self.root, f'{declared}refuses = "reports_of_others:refuses"', reports_of_others=source)
        self.addCleanup(sys.modules.pop, "reports_of_others", None)
        stream, file = io.StringIO(), self.root / "x.xml"
        reporters = make_reporters(Options(junitxml=file, journal=self.root / "journal"), stream, {})
        for event in run_events(every_outcome()):
            reporters.on_event(event)
        self.assertEqual(reporters.errors, [])
        self.assertTrue(file.exists())
        out = stream.getvalue()
        self.assertIn("the report gone (no_such_module:f) could not be made: ModuleNotFoundError", out)
        self.assertIn("the report breaks (reports_of_others:breaks) could not be made: LookupError: a mistake", out)
        self.assertNotIn("refuses", out)


class RunTest(RunsCase):
    def setUp(self):
        super().setUp()
        self.write(FILE, SIMPLE)
        self.others = self.root / "installed"
        self.environ = {"PYTHONPATH": f"{self.others}{os.pathsep}{ROOT}"}

    def test_the_report_of_the_page(self):
        files = examples()
        install(self.others, files["pyproject.toml"], markdown_report=files["markdown_report.py"])
        environ = {**self.environ, "MARKDOWN_REPORT": "summary.md"}
        # Tests beside each other end in any order.
        rows = (r"^\| test \| outcome", rf"\| {FILE}::T::test_a \| passed \| 0.\d \|", r"test_b \| failed \|")
        for words in ((), ("report",)):
            with self.subTest(words=words):
                self.finish(self.start(*words, environ=environ), 1)
                summary = (self.root / "summary.md").read_text()
                for row in rows:
                    self.assertRegex(summary, row)
                (self.root / "summary.md").unlink()

    def test_a_site_of_others(self):
        install(self.others, f'[project.entry-points."{doors.SITES}"]\nhere = "here_site:here"', here_site=SITE)
        out = self.finish(self.start("--cluster", "here", "-j", "1", environ=self.environ), 1)
        self.assertEqual(out.count("opened"), 1)
        self.assertEqual(out.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        # It is asked for the schedule, too: only a Ray cluster gets a copy of the project, which --dry-run would list.
        out = self.finish(self.start("--cluster", "here", "-j", "1", "--dry-run", environ=self.environ), 0)
        self.assertEqual(out.count("opened"), 1)
        self.assertIn("test_a", out)

    def test_a_site_that_nobody_has(self):
        install(self.others, f'[project.entry-points."{doors.SITES}"]\nhere = "no_such_site:here"')
        for name in ("there", "ray"):
            with self.subTest(name=name):
                self.finish(self.start("--cluster", name, environ=self.environ), 4)
                self.assertIn(f"--cluster {name} is not auto, slurm, here, HOST:PORT or ray://HOST", self.stderr)

    def test_a_site_that_cannot_be_loaded(self):
        install(self.others, f'[project.entry-points."{doors.SITES}"]\nhere = "no_such_site:here"')
        self.finish(self.start("--cluster", "here", environ=self.environ), 2, 3, 4)
        self.assertIn("--cluster here: no_such_site:here could not be loaded: ModuleNotFoundError", self.stderr)


if __name__ == "__main__":
    run_tests()
