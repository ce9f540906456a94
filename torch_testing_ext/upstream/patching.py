"""Send test files back: `python -m torch_testing_ext.upstream patch --pytorch CHECKOUT [FILES] [-o out.patch]`.

A file is rewritten to PyTorch's names, compared with the checkout's version, and becomes part of one patch in the form
of a mail. The checkout is only read. git makes the difference, and says at the end whether the patch applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.header import Header
from email.utils import formatdate
from pathlib import Path

from . import names, places, reasons
from .mapping import THEIR_KIT, Mistake, Side, module_on, moved, source_of
from .rewriting import STAR, Use, only_of_their_side, rewrite

# What git is configured to by its user must not show in the patch.
GIT = ("git", "-c", "core.autocrlf=false", "-c", "core.attributesFile=")
DIFF = ("diff", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative")


@dataclass(frozen=True)
class Refusal:
    """A name that the checkout has not."""

    file: Path
    line: int
    name: str  # dotted, as we call it

    def __str__(self) -> str:
        module, _, name = self.name.rpartition(".")
        why = moved(f"{module_on(Side.THEIRS, module)}.{name}") or reasons.instead_of(self.name)
        return f"{self.file}:{self.line}: {self.name} is not there ({why})"


@dataclass(frozen=True)
class Outgoing:
    """A file as it is to be in the checkout."""

    path: Path  # in the checkout
    source: bytes
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]


def outgoing(file: Path, checkout: Path) -> Outgoing:
    """Make a file ready to go, and find out what keeps it from going."""
    rewritten = rewrite(places.read(file), Side.THEIRS, file)
    strangers = set(only_of_their_side(rewritten.uses, Side.THEIRS))
    refused = tuple(
        Refusal(file, use.line, _our_name(use))
        for use in rewritten.uses
        if use in strangers or not _is_there(use, checkout)
    )
    notes = (*rewritten.notes, *_manners(rewritten.source, checkout / places.TESTS / places.below_tests(file)))
    path = places.TESTS / places.below_tests(file)
    return Outgoing(path, rewritten.source, refused, tuple(f"{file}: {note}" for note in notes))


def _our_name(use: Use) -> str:
    module = module_on(Side.OURS, use.module) or use.module
    return f"{module}.{use.name}".rstrip(".")


def _is_there(use: Use, checkout: Path) -> bool:
    source = source_of(use.module, checkout)
    return source is not None and (use.name in ("", STAR) or use.name in names.defined_in(source))


def _manners(source: bytes, target: Path) -> Iterator[str]:
    if not target.exists() and b"# Owner(s):" not in source:
        yield 'PyTorch wants a line like `# Owner(s): ["oncall: distributed"]` at the top of a new test file'


def common_files(ours: Path, checkout: Path) -> list[Path]:
    """Our test files that the checkout has too."""
    if not ours.is_dir():
        raise Mistake(f"{ours} is no directory: name the files that are to go")
    there = checkout / places.TESTS
    return [file for file in sorted(ours.rglob("*.py")) if (there / file.relative_to(ours)).is_file()]


def check_checkout(checkout: Path) -> None:
    if source_of(THEIR_KIT, checkout) is None:
        raise Mistake(f"{checkout} is no checkout of PyTorch: it has no module {THEIR_KIT}")


# -- the patch


def make(files: Mapping[Path, bytes], checkout: Path, subject: str | None) -> bytes:
    """The patch that brings files of the checkout to these contents; empty where they have them already."""
    changed = {path: source for path, source in files.items() if _content(checkout / path) != source}
    if not changed:
        return b""
    patch = _mail(subject or _subject(changed, checkout)).encode() + _difference(changed, checkout)
    _try(patch, checkout)
    return patch


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _difference(files: Mapping[Path, bytes], checkout: Path) -> bytes:
    """By a repository of its own: the old contents in its index, the new ones in its files."""
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


def _try(patch: bytes, checkout: Path) -> None:
    _git(["apply", "--check", "-"], checkout, patch)


def _git(words: Sequence[str], directory: str | Path, given: bytes = b"", ok: tuple[int, ...] = (0,)) -> bytes:
    # A directory that is no repository must not be taken for part of one that happens to be above it.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(directory).resolve().parent)}
    try:
        done = subprocess.run([*GIT, *words], cwd=directory, input=given, capture_output=True, env=alone, check=False)
    except FileNotFoundError:
        raise Mistake("this needs git, which is not on the PATH") from None
    if done.returncode not in ok:
        said = done.stderr.decode(errors="replace").strip()
        raise Mistake(f"git {words[0]} ended with code {done.returncode} in {directory}:\n{said}")
    return done.stdout


def _subject(files: Mapping[Path, bytes], checkout: Path) -> str:
    new = [path for path in files if not (checkout / path).exists()]
    verb = "Add" if len(new) == len(files) else "Update"
    first, *others = (path.name for path in files)
    return f"{verb} {first}" + (f" and {len(others)} more" if others else "")


def _mail(subject: str) -> str:
    """What `git am` reads; `git apply` skips it."""
    who = os.environ.get("GIT_AUTHOR_NAME") or _configured("user.name", "nobody")
    address = os.environ.get("GIT_AUTHOR_EMAIL") or _configured("user.email", "nobody@localhost")
    head = {"From": f"{Header(who).encode()} <{address}>", "Date": formatdate(localtime=True)}
    head["Subject"] = f"[PATCH] {Header(subject).encode(maxlinelen=0)}"
    lines = [f"From {'0' * 40} Mon Sep 17 00:00:00 2001", *(f"{key}: {text}" for key, text in head.items())]
    coding = ["MIME-Version: 1.0", "Content-Type: text/plain; charset=UTF-8", "Content-Transfer-Encoding: 8bit"]
    return "\n".join([*lines, *coding, "", "---", "", ""])


def _configured(key: str, default: str) -> str:
    said = _git(["config", "--get", key], Path.cwd(), ok=(0, 1)).decode().strip()
    return said or default
