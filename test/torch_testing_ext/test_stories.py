"""The stories of docs/contribute/architecture.md name the files that run in them: these are traced."""

import re

import pytest
from kit import story
from kit.files import FolderCase, subject
from kit.processes import ROOT, clean_environ
from kit.warm import run_cold

from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

PACKAGE = ROOT / "torch_testing_ext"
TOUR = ROOT / "docs" / "contribute" / "architecture.md"
# The first cell of a row.
FILE = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
# Every story runs through these, and no page repeats it.
BASICS = ("_process/", "_tests/")
# A file process that has no more tests ends before the story does, or a moment later. On a loaded machine, a rank that
# is late is asked what it waits in.
MAY_RUN = {"launch/probes.py", "runner/processes/fork_parent.py", "runner/processes/preloaded_server.py"}


def files_in_section(page: str, heading: str) -> set[str]:
    """The files in the table of a section of a page, without the basics."""
    section = re.split(r"^#+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return {file for file in FILE.findall(section) if not file.startswith(BASICS)}


def limits_of(page: str, heading: str) -> tuple[int, int]:
    """The most files that a story may have, and the most lines: lower them with the package, never raise them."""
    row = re.search(rf"^\| \[{re.escape(heading)}\]\(.*\) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert row is not None, heading
    files, lines = (int(number.replace(",", "")) for number in row.groups())
    return files, lines


class StoriesTest(FolderCase):
    maxDiff = None

    def trace(self, name: str, *words: str) -> dict[str, list[str]]:
        """Run Python on a subject in `test_story.py`, and return what has run in its story."""
        self.write("test_story.py", subject(__file__, name))
        folder = self.root / "story"
        environ = story.environment_of_story(folder, clean_environ(), [str(ROOT)])
        done = run_cold(*words, cwd=self.root, env=environ)
        self.assertEqual(done.returncode, 1, f"{done.stdout}\n{done.stderr}")
        functions = story.functions_of_story(folder)
        return {file: names for file, names in functions.items() if not file.startswith(BASICS)}

    def check(self, heading: str, ran: dict[str, list[str]]) -> None:
        """The section names exactly the files that ran. They and their lines are no more than the page says."""
        page = TOUR.read_text(encoding="utf-8")
        named = files_in_section(page, heading)
        not_named = {file: names for file, names in ran.items() if file not in named | MAY_RUN}
        self.assertEqual((not_named, named - {*ran} - MAY_RUN), ({}, set()), "what only ran, and what is only named")
        lines = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in named)
        most_files, most_lines = limits_of(page, heading)
        self.assertLessEqual(len(named), most_files)
        self.assertLessEqual(lines, most_lines)

    def test_a_rank_raises(self):
        self.check("A rank raises", self.trace("rank_raises.py", "test_story.py"))

    def test_a_worker_is_killed(self):
        self.write("run_test.py", subject(__file__, "run_and_report.py"))
        words = ("run_test.py", "--warm=off", "--junitxml=junit.xml", "test_story.py")
        self.check("A worker is killed", self.trace("worker_dies.py", *words))

    def test_a_function_with_world_size_fails(self):
        words = ("-m", "pytest", "-p", "torch_testing_ext.pytest_plugin", "-p", "no:cacheprovider", "test_story.py")
        self.check("A function with `world_size` fails", self.trace("marked_function_fails.py", *words))


if __name__ == "__main__":
    run_tests()
