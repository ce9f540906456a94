"""Send test files to PyTorch and import them from there.

`python -m torch_testing_ext.upstream patch --pytorch CHECKOUT [FILES] [-o out.patch]`: each file is rewritten to
PyTorch's imports and compared with the checkout's version. The result is one patch in mail format. The checkout is only
read. git computes the diff and checks that the patch applies.

`python -m torch_testing_ext.upstream import FILE... [--to test/]`: each file is rewritten to our imports.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.header import Header
from email.utils import formatdate
from pathlib import Path

from . import checkouts, names
from .mapping import PACKAGE, THEIR_KIT, Side, UserError, instead_of, module_on, moved, source_of
from .rewriting import STAR, RewrittenFile, Use, only_of_their_side, rewrite

DIFF = ("diff", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative")


@dataclass(frozen=True)
class Refusal:
    """A name that a file uses and the checkout lacks."""

    file: Path
    line: int
    name: str  # dotted, on our side

    def __str__(self) -> str:
        module, _, name = self.name.rpartition(".")
        why = moved(f"{module_on(Side.THEIRS, module)}.{name}") or instead_of(self.name)
        return f"{self.file}:{self.line}: the checkout has no {self.name} ({why})"


@dataclass(frozen=True)
class OutgoingFile:
    """A test file of ours, rewritten for the checkout."""

    path: Path  # in the checkout
    source: bytes
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]


def prepare(file: Path, checkout: Path) -> OutgoingFile:
    """Rewrite a file for the checkout, and collect the names that the checkout lacks."""
    rewritten = rewrite(checkouts.read(file), Side.THEIRS, file)
    unmapped = set(only_of_their_side(rewritten.uses, Side.THEIRS))
    refused = tuple(
        Refusal(file, use.line, _our_name(use))
        for use in rewritten.uses
        if use in unmapped or not _exists(use, checkout)
    )
    path = checkouts.TESTS / checkouts.below_tests(file)
    notes = (*rewritten.notes, *_convention_notes(rewritten.source, checkout / path))
    return OutgoingFile(path, rewritten.source, refused, tuple(f"{file}: {note}" for note in notes))


def _our_name(use: Use) -> str:
    module = module_on(Side.OURS, use.module) or use.module
    return f"{module}.{use.name}".rstrip(".")


def _exists(use: Use, checkout: Path) -> bool:
    source = source_of(use.module, checkout)
    return source is not None and (use.name in ("", STAR) or use.name in names.defined_in(source))


def _convention_notes(source: bytes, target: Path) -> Iterator[str]:
    if not target.exists() and b"# Owner(s):" not in source:
        yield 'PyTorch requires a line like `# Owner(s): ["oncall: distributed"]` at the top of a new test file'


def common_files(ours: Path, checkout: Path) -> list[Path]:
    """Our test files that also exist in the checkout."""
    if not ours.is_dir():
        raise UserError(f"{ours} is not a directory; name the files to send")
    there = checkout / checkouts.TESTS
    return [file for file in sorted(ours.rglob("*.py")) if (there / file.relative_to(ours)).is_file()]


def check_checkout(checkout: Path) -> None:
    """Raise UserError unless the directory is a PyTorch checkout."""
    if source_of(THEIR_KIT, checkout) is None:
        raise UserError(f"{checkout} is not a PyTorch checkout: it has no module {THEIR_KIT}")


# -- the patch


def make_patch(files: Mapping[Path, bytes], checkout: Path, subject: str | None) -> bytes:
    """A patch that gives files of the checkout these contents; empty if they already have them."""
    changed = {path: source for path, source in files.items() if _content(checkout / path) != source}
    if not changed:
        return b""
    patch = _mail(subject or _subject(changed, checkout)).encode() + _diff(changed, checkout)
    _check_applies(patch, checkout)
    return patch


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _diff(files: Mapping[Path, bytes], checkout: Path) -> bytes:
    """Diff in a temporary repository that has the old contents in its index and the new ones in its files."""
    with tempfile.TemporaryDirectory() as directory:
        _git(["init", "--quiet"], directory)
        for path in files:
            if (checkout / path).is_file():
                Path(directory, path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / path, Path(directory, path))  # with its mode
        _git(["add", "--force", "."], directory)
        for path, source in files.items():
            Path(directory, path).parent.mkdir(parents=True, exist_ok=True)
            Path(directory, path).write_bytes(source)
        _git(["add", "--force", "--intent-to-add", "."], directory)
        return _git(DIFF, directory)


def _check_applies(patch: bytes, checkout: Path) -> None:
    _git(["apply", "--check", "-"], checkout, patch)


def _git(words: Sequence[str], directory: str | Path, stdin: bytes = b"", ok: tuple[int, ...] = (0,)) -> bytes:
    done = checkouts.run_git(words, Path(directory), stdin)
    if done.returncode not in ok:
        message = done.stderr.decode(errors="replace").strip()
        raise UserError(f"git {words[0]} exited with code {done.returncode} in {directory}:\n{message}")
    return done.stdout


def _subject(files: Mapping[Path, bytes], checkout: Path) -> str:
    new = [path for path in files if not (checkout / path).exists()]
    verb = "Add" if len(new) == len(files) else "Update"
    first, *others = (path.name for path in files)
    return f"{verb} {first}" + (f" and {len(others)} more" if others else "")


def _mail(subject: str) -> str:
    """The mail header that `git am` reads and `git apply` skips."""
    author = os.environ.get("GIT_AUTHOR_NAME") or _configured("user.name", "nobody")
    address = os.environ.get("GIT_AUTHOR_EMAIL") or _configured("user.email", "nobody@localhost")
    head = {"From": f"{Header(author).encode()} <{address}>", "Date": formatdate(localtime=True)}
    head["Subject"] = f"[PATCH] {Header(subject).encode(maxlinelen=0)}"
    lines = [f"From {'0' * 40} Mon Sep 17 00:00:00 2001", *(f"{key}: {text}" for key, text in head.items())]
    coding = ["MIME-Version: 1.0", "Content-Type: text/plain; charset=UTF-8", "Content-Transfer-Encoding: 8bit"]
    return "\n".join([*lines, *coding, "", "---", "", ""])


def _configured(key: str, default: str) -> str:
    value = _git(["config", "--get", key], Path.cwd(), ok=(0, 1)).decode().strip()
    return value or default


# -- files of PyTorch


@dataclass(frozen=True)
class ImportedFile:
    """A PyTorch test file, rewritten for this tree, and the path it gets here."""

    file: Path
    target: Path
    rewritten: RewrittenFile

    def problems(self) -> Iterator[str]:
        """The differences that keep the file from running here as it does in PyTorch."""
        yield from self.rewritten.notes
        for use in self.rewritten.uses:
            if use.name not in ("", STAR) and not _is_here(use):
                where = moved(f"{module_on(Side.THEIRS, use.module)}.{use.name}")
                yield f"line {use.line}: {use.module} has no {use.name}" + (f" ({where})" if where else "")
        for use in only_of_their_side(self.rewritten.uses, Side.OURS):
            dotted = f"{use.module}.{use.name}".rstrip(".")
            yield f"line {use.line}: {dotted} stays PyTorch's, since it has no counterpart here"


def _is_here(use: Use) -> bool:
    if source_of(use.module, PACKAGE.parent) is None:
        return True  # not a module of ours: reported by only_of_their_side
    return hasattr(importlib.import_module(use.module), use.name)


def import_files(files: Sequence[Path], to: Path, force: bool = False) -> list[ImportedFile]:
    """Write the rewritten files below `to`: all of them, or none if one cannot be written."""
    imported = []
    for path in files:
        rewritten = rewrite(checkouts.read(path), Side.OURS, path)
        imported.append(ImportedFile(path, to / checkouts.below_tests(path), rewritten))
    for file in imported:
        differs = file.target.exists() and file.target.read_bytes() != file.rewritten.source
        if differs and not force:
            raise UserError(f"{file.target} already exists and differs: move it away, or use --force")
    for file in imported:
        file.target.parent.mkdir(parents=True, exist_ok=True)
        file.target.write_bytes(file.rewritten.source)
    return imported
