"""Installed plugins of pytest whose state lives as long as a session, under run_test.py."""

import os

import pytest
from kit.files import subject
from kit.runs import ROOT, RunsCase

from torch_testing_ext.common_utils import run_tests

# As syrupy does.
NEEDS_A_SESSION = """
def pytest_sessionstart(session):
    session.config.collectors = []

def pytest_collectstart(collector):
    collector.config.collectors.append(collector.nodeid)

def pytest_collection_finish(session):
    assert session.config.collectors
"""
# As plugins for snapshots and coverage do.
JUDGES_A_SESSION = """
def pytest_sessionfinish(session):
    if session.testscollected < 2:
        session.exitstatus = 1
"""
CONFTEST = """
def pytest_sessionfinish(session):
    session.exitstatus = 7
"""


@pytest.mark.slow
class InstalledPluginsTest(RunsCase):
    def test_files_are_found_where_a_plugin_needs_a_session(self) -> None:
        self.install("needs_a_session", NEEDS_A_SESSION)
        self.write("test_it.py", "def test_passes(): ...\ndef test_fails(): assert 0\n")
        self.assertEqual(self.run_all(), {"test_passes": "passed", "test_fails": "failed"})

    def test_only_the_project_judges_a_session(self) -> None:
        """An installed plugin judges a whole one, of which a worker has a part."""
        self.install("judges_a_session", JUDGES_A_SESSION)
        knows = "import os, pytest\ndef test_two(): assert os.environ['PYTEST_VERSION'] == pytest.__version__\n"
        self.write("test_it.py", f"{knows}def test_one(): ...\n")
        self.assertEqual(self.run_all(), {"test_one": "passed", "test_two": "passed"})
        self.write("conftest.py", CONFTEST)
        self.assertEqual(self.run_all(), {"test_one": "error", "test_two": "error"})

    def test_marks_keep_tests_in_one_process(self) -> None:
        self.write("pytest.ini", "[pytest]\nmarkers =\n    dependency:\n    xdist_group:\n")
        self.write("test_it.py", subject(__file__, "tests_in_groups.py"))
        names = ("first", "second", "in_group", "in_the_same", "in_another", "in_none")
        self.assertEqual(self.run_all(), {f"test_{name}": "passed" for name in names})

    def install(self, name: str, source: str) -> None:
        """Install a plugin in a folder, as its metadata says."""
        self.write(f"installed/{name}.py", source)
        self.write(f"installed/{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        self.write(f"installed/{name}-1.0.dist-info/entry_points.txt", f"[pytest11]\n{name} = {name}\n")

    def run_all(self) -> dict[str, str]:
        environ = {"PYTHONPATH": os.pathsep.join((str(self.root / "installed"), str(ROOT)))}
        # A warm server has no such plugin.
        process = self.start("--results=results.json", "-j2", environ=environ, cold=True)
        self.finish(process, 0, 1)
        return self.outcomes()


if __name__ == "__main__":
    run_tests()
