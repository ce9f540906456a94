"""Send test files to PyTorch.

`python -m torch_testing_ext.upstream patch --pytorch CHECKOUT [FILES] [-o out.patch]` loads this module: each file is
rewritten to PyTorch's imports and compared with the checkout's version. The result is one patch in mail format. The
checkout is only read. git computes the diff and checks that the patch applies.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.header import Header
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path

# First: it says how to install libcst.
from torch_testing_ext.upstream.rewriting import (
    STAR,
    Edit,
    Finder,
    RewrittenFile,
    Use,
    aliases_of,
    is_plain,
    of_the_other_kit,
    only_of_their_side,
    rewrite_file,
)

sys.path.append(str(Path(__file__).parents[1] / "docs" / "tools"))

# isort: split
import checkout_git
import hardware_rules
import kit_names
import libcst as cst
import patch_series
import vendoring
from libcst.helpers import get_full_name_for_node
from vendoring import INSTEAD

from torch_testing_ext.upstream import defined_names, imported_files
from torch_testing_ext.upstream.mapping import THEIR_KIT, Side, UserError, module_on, moved_name, source_of

# The lines at the top of a file by which PyTorch finds its owners, and says whose it is.
_HEADER = ("# Owner(s):", "# Copyright")
# As PyTorch's linter formats its Python.
_STYLE = Path(__file__).with_name("tests") / "ruff.toml"
DIFF = ("diff", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative")


@dataclass(frozen=True)
class Refusal:
    """A name that a file uses and the checkout lacks."""

    file: Path
    line: int
    name: str  # dotted, on our side

    def __str__(self) -> str:
        module, _, name = self.name.rpartition(".")
        theirs = module_on(Side.THEIRS, module) or module
        why = moved_name(f"{theirs}.{name}") or _in_other_versions(theirs, name) or instead_of(self.name)
        return f"{self.file}:{self.line}: the checkout has no {self.name} ({why})"


@dataclass(frozen=True)
class OutgoingFile:
    """A test file of ours, rewritten for the checkout."""

    path: Path  # in the checkout
    source: bytes
    refused: tuple[Refusal, ...]
    lost: tuple[str, ...]  # lines of the checkout's header that it lacks
    broken: tuple[str, ...]  # rules of the checkout's linter that it breaks
    notes: tuple[str, ...]


def prepare(file: Path, checkout: Path) -> OutgoingFile:
    """Rewrite a file for the checkout, and collect the names that the checkout lacks."""
    rewritten = for_pytorch(imported_files.read_file(file), file)
    unmapped = set(only_of_their_side(rewritten.uses, Side.THEIRS))
    refused = tuple(
        Refusal(file, use.line, _our_name(use))
        for use in rewritten.uses
        if use in unmapped or not _exists(use, checkout)
    )
    path = imported_files.TESTS / imported_files.below_tests(file)
    target = checkout / path
    there = target.read_bytes() if target.is_file() else None
    source = rewritten.source if rewritten.source == there else formatted(rewritten.source, there)
    notes = (*rewritten.notes, *_convention_notes(source, there), *_prerequisites(path, checkout))
    lost = tuple(line for line in _header(there or b"") if line not in _header(source))
    broken = hardware_rules.violations(path, source, checkout)
    return OutgoingFile(path, source, refused, lost, broken, tuple(f"{file}: {note}" for note in notes))


def _in_other_versions(module: str, name: str) -> str | None:
    """Name the versions of PyTorch that have it, of those whose names are recorded."""
    versions = [version for version, kit in kit_names.recorded().items() if name in kit.get(module, ())]
    return f"PyTorch has it in {', '.join(versions)}" if versions else None


def instead_of(dotted: str) -> str:
    """Name what to use in PyTorch instead of a name of ours."""
    matching = [name for name in INSTEAD if dotted == name or dotted.startswith(f"{name}.")]
    return INSTEAD[max(matching, key=len)]


def _our_name(use: Use) -> str:
    module = module_on(Side.OURS, use.module) or use.module
    return f"{module}.{use.name}".rstrip(".")


def _exists(use: Use, checkout: Path) -> bool:
    source = source_of(use.module, checkout)
    return source is not None and (use.name in ("", STAR) or use.name in defined_names.defined_in(source))


def _convention_notes(source: bytes, there: bytes | None) -> Iterator[str]:
    if there is None and b"# Owner(s):" not in source:
        yield 'PyTorch requires a line like `# Owner(s): ["oncall: distributed"]` at the top of a new test file'
    if not _has_formatter():
        yield "not formatted as PyTorch's linter would: `pip install ruff`, and run this again"


def _prerequisites(path: Path, checkout: Path) -> Iterator[str]:
    """The patches of the series that the checkout lacks and the file needs."""
    for slug in patch_series.NEEDED.get(path.as_posix(), ()):
        files = sorted(Path(__file__).parent.glob(f"[0-9]*-{slug}.*"))
        words = "apply", "--reverse", "--check"
        if all(checkout_git.run_git([*words, str(file)], checkout).returncode != 0 for file in files):
            yield f"it needs {', or '.join(file.name for file in files)}: send that first"


def _header(source: bytes) -> list[str]:
    """The owners and the copyright of a file."""
    lines = source.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.startswith(_HEADER)]


def _has_formatter() -> bool:
    return importlib.util.find_spec("ruff") is not None


def formatted(source: bytes, there: bytes | None) -> bytes:
    """Format a file as PyTorch's linter does, unless the checkout's version is not formatted so."""
    if not _has_formatter() or (there is not None and _run_formatter(there) != there):
        return source
    return _run_formatter(source)


def _run_formatter(source: bytes) -> bytes:
    for words in (["check", "--select", "I", "--fix", "--exit-zero", "--quiet"], ["format"]):
        command = [sys.executable, "-m", "ruff", words[0], "--config", str(_STYLE), *words[1:], "-"]
        done = subprocess.run(command, input=source, capture_output=True, check=False)
        if done.returncode != 0:
            raise UserError(f"ruff {words[0]} failed: {done.stderr.decode(errors='replace').strip()}")
        source = done.stdout
    return source


def common_files(ours: Path, checkout: Path) -> list[Path]:
    """Our test files that also exist in the checkout."""
    if not ours.is_dir():
        raise UserError(f"{ours} is not a directory; name the files to send")
    there = checkout / imported_files.TESTS
    return [file for file in sorted(ours.rglob("*.py")) if (there / file.relative_to(ours)).is_file()]


def check_checkout(checkout: Path) -> None:
    """Raise UserError unless the directory is a PyTorch checkout."""
    if source_of(THEIR_KIT, checkout) is None:
        raise UserError(f"{checkout} is not a PyTorch checkout: it has no module {THEIR_KIT}")


# -- imports, as they were in PyTorch


def for_pytorch(source: bytes, path: Path) -> RewrittenFile:
    """Rewrite a file to PyTorch's imports. Undoes what the import of it has done."""
    return rewrite_file(source, Side.THEIRS, path, _MergingFinder)


class _MergingFinder(Finder):
    """A Finder that joins the statements into which the import of a file has split one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._merged: set[cst.CSTNode] = set()  # the packages in statements that were merged into the one before

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._merge(node.body)

    def visit_SimpleStatementSuite(self, node: cst.SimpleStatementSuite) -> None:
        self._merge(node.body)

    def _merge(self, line: Sequence[cst.BaseSmallStatement]) -> None:
        for before, after in pairwise(line):
            target = self._their_package(before)
            if target is not None and target == self._their_package(after):
                assert isinstance(before, cst.ImportFrom) and isinstance(after, cst.ImportFrom) and after.module
                package = get_full_name_for_node(after.module)
                self.edits[self.end_of(aliases_of(before)[-1])] = Edit(f"; from {package} import ", ", ")
                self._merged.add(after.module)

    def _their_package(self, node: cst.BaseSmallStatement) -> str | None:
        """The package of PyTorch's from which a statement imports only modules, if written as an import writes it."""
        if not isinstance(node, cst.ImportFrom) or not node.module or node.relative or not is_plain(node):
            return None
        package = get_full_name_for_node(node.module) or ""
        new = {new and new.rpartition(".")[0] for new in self.pairs_of(node, package).values()}
        if new == {None} and of_the_other_kit(package, Side.OURS):
            return package
        return new.pop() if len(new) == 1 else None

    def edit(self, node: cst.CSTNode | None, old: str, new: str) -> None:
        if node not in self._merged:
            super().edit(node, old, new)


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
    done = checkout_git.run_git(words, Path(directory), stdin)
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


# -- the command


def main(words: Sequence[str], prog: str) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.description = "Rewrite our test files to PyTorch's imports and write a patch for a checkout. Needs git."
    parser.add_argument(
        "--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a PyTorch checkout (only read)"
    )
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="our test files (default: all in test/ that it has too)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="write the patch to OUT (default: stdout)")
    parser.add_argument("--subject", metavar="TEXT", help="subject line of the patch")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--vendor", action="store_true", help="append names that exist only here to PyTorch's helper modules"
    )
    mode.add_argument("--check", action="store_true", help="write nothing; report whether the files are ready to send")
    return run(parser.parse_args(words))


def run(options: argparse.Namespace) -> int:
    """Make or check the patch that the options of the command describe. Return the exit code."""
    check_checkout(options.pytorch)
    files = options.files or common_files(Path("test"), options.pytorch)
    prepared = [prepare(file, options.pytorch) for file in files]
    for note in (note for file in prepared for note in file.notes):
        print(note, file=sys.stderr)
    refused = [refusal for file in prepared for refusal in file.refused]
    lost = [
        f"{file.path}: this line of the checkout's file is missing: {line}" for file in prepared for line in file.lost
    ]
    if lost:
        print("\n".join(lost), file=sys.stderr)
        print("Not ready to send. Add these lines to the top of the file.", file=sys.stderr)
        return 1
    broken = [f"{file.path}, {rule}" for file in prepared for rule in file.broken]
    if broken:
        print("\n".join(broken), file=sys.stderr)
        print("Not ready to send. PyTorch's linter (TEST_LINTER) would refuse this.", file=sys.stderr)
        return 1
    contents = {file.path: file.source for file in prepared}
    if options.vendor:
        contents |= vendoring.appended([refusal.name for refusal in refused], options.pytorch)
    elif refused:
        print("\n".join(map(str, refused)), file=sys.stderr)
        print("Not ready to send. Use --vendor to include these names where possible.", file=sys.stderr)
        return 1
    if options.check:
        print(f"ready to send: {', '.join(str(file.path) for file in prepared)}")
        return 0
    patch = make_patch(contents, options.pytorch, options.subject)
    if not patch:
        print("nothing to send: the checkout already has these files as they are here", file=sys.stderr)
    if options.output is None:
        sys.stdout.buffer.write(patch)
    else:
        options.output.write_bytes(patch)
    return 0
