"""The documentation's examples run, its links lead somewhere, and it names exactly the settings that there are."""

import ast
import os
import re
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.warm import run_warm

import torch_testing_ext
from torch_testing_ext._process import project_settings, setting_names
from torch_testing_ext.launch import launch_settings

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_testing_ext"
# Short pages with examples of their own kind, which test_moving.py runs.
MOVING = sorted(page for page in (ROOT / "docs" / "migrate").glob("*.md") if page.stem not in ("index", "pytorch"))
FOUND = ROOT / "docs" / "found" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*MOVING, FOUND})]
# test_newcomer.py does what these say.
NEWCOMER = [ROOT / "README.md", *(ROOT / "docs" / "get-started").glob("*.md")]
EXAMPLE = re.compile(r"^```python\n(# file: (?P<name>\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#\s]*)(#(?P<section>[^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SOURCE = re.compile(r"`([\w*/]+(?:\.py|/))`")
SETTING = re.compile(rf"\b{setting_names.PREFIX}[A-Z_]*[A-Z]\b")


def sections(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class DocsTest(unittest.TestCase):
    @pytest.mark.slow
    def test_examples_run(self):
        names = []
        with tempfile.TemporaryDirectory() as directory:
            for page in sorted(set(PAGES) - set(NEWCOMER)):
                for found in EXAMPLE.finditer(page.read_text(encoding="utf-8")):
                    with self.subTest(page=page.name, file=found["name"]):
                        names.append(found["name"])
                        file = Path(directory, found["name"])
                        file.write_text(found[1], encoding="utf-8")
                        self.run_file(file)
        self.assertTrue(names, "no page has an example that is a complete file")
        self.assertEqual(len(names), len(set(names)), f"two examples have the same name: {names}")

    def run_file(self, file):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        is_for_pytest = "run_tests()" not in file.read_text(encoding="utf-8")
        runner = ["-m", "pytest", "-p", "torch_testing_ext.pytest_plugin", "-p", "no:cacheprovider"]
        command = [*(runner if is_for_pytest else []), file.name]
        done = run_warm(*command, cwd=file.parent, env={**environ, "PYTHONPATH": path})
        self.assertEqual(done.returncode, 0, f"{file.name} failed:\n{done.stdout}{done.stderr}")

    def test_settings_are_known_and_documented(self):
        named = {name for page in PAGES for name in SETTING.findall(page.read_text(encoding="utf-8"))}
        known = {name for name in named if not name.startswith(project_settings.RUNNER_PREFIX)}
        self.assertEqual(known, set(launch_settings.known_names()))

    def test_links_lead_somewhere(self):
        others = [
            ROOT / "CHANGELOG.md",
            *(ROOT / name / "README.md" for name in ("benchmarks", "docs/found", "examples")),
        ]
        for page in [*PAGES, *MOVING, *others]:
            for link in LINK.finditer(page.read_text(encoding="utf-8")):
                with self.subTest(page=page.name, link=link.group()):
                    target = page.parent / link["file"] if link["file"] else page
                    self.assertTrue(target.exists(), f"there is no file {target}")
                    if link["section"]:
                        self.assertIn(link["section"], sections(target))

    def test_every_page_is_on_the_site(self):
        """mkdocs checks that too, but where it is not installed nobody would notice. It reads tags of its own."""
        listed = re.findall(
            r"^ *- (?:[^:]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
        )
        (patterns,) = re.findall(r"(?m)^PAGES = (\(.*\))$", (ROOT / "docs/tools/site.py").read_text(encoding="utf-8"))
        found = {page for pattern in ast.literal_eval(patterns) for page in ROOT.glob(pattern) if page.suffix == ".md"}
        pages = {str(page.relative_to(ROOT)) for page in found}
        others = {name for name in listed if not (ROOT / name).is_file()}
        self.assertEqual((pages - set(listed), others), (set(), set()))

    def test_sources_named_in_the_tour_exist(self):
        """Paths may leave out the package's folder; those of the runner its folder too."""
        for page in ("architecture.md", "glossary.md"):
            for name in SOURCE.findall((ROOT / "docs" / "contribute" / page).read_text(encoding="utf-8")):
                with self.subTest(page=page, source=name):
                    places = (ROOT, PACKAGE, PACKAGE / "runner", PACKAGE / "_spmd")
                    self.assertTrue(any(any(place.glob(name.rstrip("/"))) for place in places))

    def test_good_first_issues_name_a_file_and_a_test(self):
        page = ROOT / "docs" / "contribute" / "good-first-issues.md"
        rows = re.findall(
            r"^\|.*\| `(torch_testing_ext/\S+)` \| `(test/\S+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        self.assertGreaterEqual(len(rows), 10)
        self.assertEqual([name for row in rows for name in row if not (ROOT / name).is_file()], [])

    def test_the_glossary_is_short_and_in_alphabetical_order(self):
        lines = (ROOT / "docs" / "contribute" / "glossary.md").read_text(encoding="utf-8").splitlines()
        terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
        self.assertGreater(len(terms), 20)
        self.assertLessEqual(len(terms), 30)
        self.assertEqual(terms, sorted(set(terms)))


if __name__ == "__main__":
    unittest.main()
