"""Each name of a module of the package in a string, a comment or a page names a module, or something in one."""

import textwrap
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.names_in_text import PACKAGE, KnownModules, faults_of_source, faults_of_text
from kit.sources import modules_below

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
KNOWN = KnownModules(modules_below(ROOT / PACKAGE), tests=ROOT / "test" / PACKAGE)
FOLDERS = (PACKAGE, "test", "benchmarks", "docs", "examples", "patches")
PAGES = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / ".github", ROOT / ".ci", ROOT / PACKAGE / "runner")
# The changelog and the patches for PyTorch name what there was, and what there is elsewhere.
NOT_READ = {ROOT / "CHANGELOG.md"}
# Names that do not exist on purpose: users' files, planted names, and a part of a message.
MISSING_ON_PURPOSE = {
    (f"test/{PACKAGE}/launch/test_hang.py", f"test/{PACKAGE}/support.py: no such file"),
    (f"test/{PACKAGE}/upstream/test_patch_command.py", f"{PACKAGE}._: {PACKAGE} has no _"),
    (
        f"test/{PACKAGE}/upstream/test_rewriting.py",
        f"{PACKAGE}.common_utils.NEWER: {PACKAGE}.common_utils has no NEWER",
    ),
    # the folder of a checkout
    ("docs/contribute/patches.md", f"{PACKAGE}/patches: no such file"),
}


def sources() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.py"))
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            is_linked = any(parent.is_symlink() for parent in file.parents if parent != ROOT)
            if not is_linked and "/." not in str(file.relative_to(ROOT)):
                yield file


def pages() -> Iterator[Path]:
    for folder in PAGES:
        for suffix in ("md", "toml", "yml", "yaml", "html", "js"):
            yield from (file for file in sorted(folder.rglob(f"*.{suffix}")) if folder != ROOT or file.parent == ROOT)
    yield ROOT / ".ci" / "run"


class NamesInStringsTest(unittest.TestCase):
    @pytest.mark.slow
    def test_sources(self) -> None:
        faults = []
        for file in sources():
            place = file if file.is_relative_to(ROOT / PACKAGE) else None
            for line, fault in faults_of_source(file.read_text(encoding="utf-8"), KNOWN, place):
                if (str(file.relative_to(ROOT)), fault) not in MISSING_ON_PURPOSE:
                    faults.append(f"{file.relative_to(ROOT)}:{line}: {fault}")
        self.assertEqual(faults, [], "\n" + "\n".join(faults))

    def test_pages(self) -> None:
        faults = []
        for file in pages():
            if file in NOT_READ or not file.exists():
                continue
            for above, fault in faults_of_text(file.read_text(encoding="utf-8"), KNOWN):
                if fault is not None and (str(file.relative_to(ROOT)), fault) not in MISSING_ON_PURPOSE:
                    faults.append(f"{file.relative_to(ROOT)}:{above + 1}: {fault}")
        self.assertEqual(faults, [], "\n" + "\n".join(faults))

    def test_what_is_read(self) -> None:
        read = {str(file.relative_to(ROOT)) for file in (*sources(), *pages())}
        self.assertGreater(len(read), 500)
        self.assertLessEqual(
            {"run_test.py", "torch_testing_ext/ranks.py", "test/conftest.py", "README.md", "pyproject.toml"}, read
        )


def faults_in(source: str, place: Path | None = None) -> list[tuple[int, str]]:
    """The faults of a source in which KIT stands for the package, so that this file has no wrong name."""
    return sorted(faults_of_source(textwrap.dedent(source).replace("KIT", PACKAGE), KNOWN, place))


class PlantedNamesTest(unittest.TestCase):
    def assert_faults(self, source: str, *texts: str, place: Path | None = None) -> None:
        found = [text for _, text in faults_in(source, place)]
        self.assertEqual([text.replace(PACKAGE, "KIT") for text in found], list(texts), source)

    def test_right_names(self) -> None:
        self.assert_faults(
            '''
            """KIT.launch, and KIT/launch/verdict.py. A sentence may end with KIT.launch."""
            import sys
            sys.modules.get("KIT.launch.verdict")
            mock.patch("KIT.launch.launch")
            mock.patch("KIT.common_distributed.MultiProcessTestCase.setUp")
            name.startswith("KIT.")
            exclude = ["KIT/", "KIT/launch/", "KIT/launch/*.py", "test/KIT/launch/test_verdict.py", ".KIT/runs/x"]
            module = f"KIT.launch.{name}"
            start = f"KIT.launch.ver{name}"
            code = "\\nfrom KIT.common_utils import run_tests, TestCase\\nrun_tests()"
            words = [sys.executable, "-m", "KIT.runner.cluster.agent"]
            shown = "python -m KIT test_x"
            interpreter.command("launch.fork_server", path)
            os.path.join("KIT", "launch", "verdict.py")
            '''
        )

    def test_strings_and_comments(self) -> None:
        for source in (
            'sys.modules.get("KIT.launch.nowhere")',
            'if "KIT.launch.nowhere" in sys.modules: pass',
            '"""Read KIT.launch.nowhere first."""',
            "x = 1  # as in KIT.launch.nowhere",
            'NAMES = {"a": ("KIT.launch.nowhere",)}',
            'code = "import sys\\nimport KIT.launch.nowhere"',
            'code = f"{head}import KIT.launch.nowhere; {tail}"',
        ):
            self.assert_faults(source, "KIT.launch.nowhere: KIT.launch has no nowhere")

    def test_a_line_inside_a_long_string(self) -> None:
        self.assertEqual(
            faults_in('a = 1\nb = """\nimport sys\nimport KIT.nowhere\n"""'),
            [(4, f"{PACKAGE}.nowhere: {PACKAGE} has no nowhere")],
        )

    def test_attributes(self) -> None:
        self.assert_faults('mock.patch("KIT.launch.nothing")', "KIT.launch.nothing: KIT.launch has no nothing")
        self.assert_faults(
            'code = "from KIT.common_utils import run_tests, nothing"',
            "KIT.common_utils.nothing: KIT.common_utils has no nothing",
        )

    def test_heads_of_f_strings(self) -> None:
        self.assert_faults('f"KIT.nowhere.{name}"', "KIT.nowhere....: no module begins so")
        self.assert_faults('f"KIT.launch.nowhere{name}"', "KIT.launch.nowhere...: no module begins so")
        self.assert_faults('"KIT.nowhere."', "KIT.nowhere....: no module begins so")

    def test_paths(self) -> None:
        self.assert_faults('"KIT/launch/nowhere.py"', "KIT/launch/nowhere.py: no such file")
        self.assert_faults('"KIT/nowhere/"', "KIT/nowhere/: no such file")
        self.assert_faults('"/home/me/KIT/nowhere/rank.py"', "KIT/nowhere/rank.py: no such file")
        self.assert_faults('"test/KIT/launch/test_no.py"', "test/KIT/launch/test_no.py: no such file")
        self.assert_faults('f"KIT/nowhere/{name}"', "KIT/nowhere: no such file")
        self.assert_faults('os.path.join("KIT", "nowhere", name)', "KIT/nowhere: no such file")

    def test_programs(self) -> None:
        # A package that has no __main__.py exists, and is no program.
        self.assert_faults('["-m", "KIT.launch"]', "-m KIT.launch: a package without __main__.py")
        self.assert_faults('"python -m KIT.launch x"', "-m KIT.launch: a package without __main__.py")
        self.assert_faults('interpreter.command("launch.no", x)', "interpreter.command('launch.no'): no such module")
        self.assert_faults(
            'interpreter.command("launch.verdict", x)',
            "interpreter.command('launch.verdict'): no main() in KIT.launch.verdict",
        )

    def test_in_the_package(self) -> None:
        place = ROOT / PACKAGE / "launch" / "verdict.py"
        # `launch` is a function there, which `sys.modules` never has.
        self.assert_faults('sys.modules.get("KIT.launch.launch")', "KIT.launch.launch: no such module", place=place)
        self.assert_faults(
            'Path(__file__).with_name("no.py")', "Path(__file__).with_name('no.py'): no such file", place=place
        )
        self.assert_faults('Path(__file__).with_name("verdict.py")', place=place)


if __name__ == "__main__":
    run_tests()
