"""The patches for PyTorch in `patches/`: which there are for a version of torch, and proof that each does its work.

A patch has a test of its own, which fails before the patch and passes after it. Both runs use a copy of the installed
torch that consists of links, except for the files that the patches change: site-packages is only read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import checkouts
from .mapping import UserError

# A patch without a version is for every torch that has a series; one with a version only for that torch.
_NAME = re.compile(r"(?P<number>\d{4})-(?P<slug>[a-z0-9-]+?)(\.torch-(?P<torch>\d+\.\d+))?\.patch")
_RAN = re.compile(r"^Ran (\d+) tests?\b", re.MULTILINE)
_SUBJECT = re.compile(r"^Subject: (.*(?:\n[ \t].*)*)", re.MULTILINE)
TEST_TIMEOUT = 900.0


@dataclass(frozen=True)
class SeriesPatch:
    """One patch of the series."""

    file: Path
    number: int
    slug: str

    @property
    def subject(self) -> str:
        found = _SUBJECT.search(self.file.read_text(encoding="utf-8"))
        words = re.sub(r"\s+", " ", found[1]) if found else self.slug
        return words.removeprefix("[PATCH] ")

    @property
    def test(self) -> Path:
        return self.file.parent / "tests" / f"test_{self.slug.replace('-', '_')}.py"


@dataclass(frozen=True)
class TestRun:
    """The end of the test of a patch."""

    code: int
    ran: int
    output: str

    __test__ = False

    @property
    def passed(self) -> bool:
        return self.code == 0 and self.ran > 0 and "skipped=" not in self.output

    @property
    def failed(self) -> bool:
        """Whether tests ran and failed; a file that cannot be imported proves nothing."""
        return self.code != 0 and self.ran > 0


def load(directory: Path, version: str) -> tuple[SeriesPatch, ...]:
    """The series for a version of torch, such as "2.13", in order."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; name the directory of the patches with --series")
    chosen: dict[str, SeriesPatch] = {}
    for file in sorted(directory.glob("*.patch")):
        match = _NAME.fullmatch(file.name)
        if match is None:
            raise UserError(f"{file}: a patch is named NNNN-its-subject.patch or NNNN-its-subject.torch-X.Y.patch")
        if match["torch"] in (None, version):
            if match["slug"] in chosen:
                raise UserError(f"{file} and {chosen[match['slug']].file.name} are both for torch {version}")
            chosen[match["slug"]] = SeriesPatch(file, int(match["number"]), match["slug"])
    return tuple(sorted(chosen.values(), key=lambda patch: patch.number))


def others(directory: Path, version: str) -> tuple[str, ...]:
    """The slugs of patches that there are only for other versions of torch."""
    have = {patch.slug for patch in load(directory, version)}
    matches = (_NAME.fullmatch(file.name) for file in sorted(directory.glob("*.patch")))
    return tuple(dict.fromkeys(match["slug"] for match in matches if match and match["slug"] not in have))


def version_of(package: Path) -> str:
    """The major and minor version of a torch package, such as "2.13"."""
    found = re.search(r"__version__ = '(\d+\.\d+)", (package / "version.py").read_text())
    if found is None:
        raise UserError(f"{package}/version.py does not tell the version of torch")
    return found[1]


class PatchedTorch:
    """A directory with a package torch that consists of links to another one, except for the files to be changed."""

    def __init__(self, root: Path, package: Path, changed: Iterable[Path]):
        """`changed`: paths of the form torch/..., which need not exist."""
        self.root = root
        self._changed = frozenset(changed)
        self._folders = {parent for path in self._changed for parent in path.parents}
        self._link(package, Path("torch"))

    def _link(self, source: Path, path: Path) -> None:
        target = self.root / path
        if path in self._changed:
            shutil.copyfile(source, target)
        elif path not in self._folders:
            target.symlink_to(source)
        else:
            target.mkdir()
            for entry in source.iterdir():
                if entry.name != "__pycache__":
                    self._link(entry, path / entry.name)

    def apply(self, patch: SeriesPatch) -> None:
        git(["--check", str(patch.file.absolute())], self.root)
        git([str(patch.file.absolute())], self.root)

    def run(self, test: Path) -> TestRun:
        """Run a test file with this torch."""
        if not test.is_file():
            raise UserError(f"{test} does not exist: each patch has a test of this name")
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, str(test.absolute())]
        # Not in the current directory: it may hold packages of its own.
        with tempfile.TemporaryDirectory(prefix="torch_testing_ext_patch_") as directory:
            ran = subprocess.run(
                command,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TEST_TIMEOUT,
                check=False,
            )
        counts = _RAN.findall(ran.stdout)
        return TestRun(ran.returncode, int(counts[-1]) if counts else 0, ran.stdout)


def git(words: Sequence[str], directory: Path) -> str:
    """Run `git apply` in a directory."""
    done = checkouts.run_git(["apply", "--whitespace=nowarn", *words], directory)
    if done.returncode != 0:
        raise UserError(f"{words[-1]} does not apply:\n{done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def files_of(patch: SeriesPatch) -> Iterator[Path]:
    """The files that a patch changes."""
    with tempfile.TemporaryDirectory() as nowhere:
        for line in git(["--numstat", str(patch.file.absolute())], Path(nowhere)).splitlines():
            yield Path(line.split("\t")[2])


@contextmanager
def patched_torch(patches: Sequence[SeriesPatch], package: Path) -> Iterator[PatchedTorch]:
    """A copy of the package in which all files of these patches can be changed. No patch is applied yet."""
    changed = [path for patch in patches for path in files_of(patch)]
    if foreign := [str(path) for path in changed if path.parts[0] != "torch"]:
        raise UserError(f"no wheel has {', '.join(foreign)}: patches of the series change files below torch/")
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext_torch_") as directory:
        yield PatchedTorch(Path(directory), package, changed)


def check(patches: Sequence[SeriesPatch], wanted: Sequence[SeriesPatch], package: Path) -> Iterator[tuple[str, bool]]:
    """Apply the patches in order; run the test of each wanted one before and after.

    Yields lines of a report, each with whether it is good news.
    """
    with patched_torch(patches, package) as torch:
        for patch in patches:
            before = torch.run(patch.test) if patch in wanted else None
            torch.apply(patch)
            if before is not None:
                yield from _judge(patch, before, torch.run(patch.test))


def _judge(patch: SeriesPatch, before: TestRun, after: TestRun) -> Iterator[tuple[str, bool]]:
    if before.failed and after.passed:
        tests = "1 test" if after.ran == 1 else f"{after.ran} tests"
        yield f"{patch.file.name}: {patch.test.name} fails before, and passes after ({tests})", True
    if not before.failed:
        what = "passes" if before.passed else "could not run"
        yield f"{patch.file.name}: {patch.test.name} {what} before the patch, but must fail\n{before.output}", False
    if not after.passed:
        yield f"{patch.file.name}: {patch.test.name} does not pass after the patch\n{after.output}", False
