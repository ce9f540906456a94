"""Make the commit of a pull request in a checkout of PyTorch.

`python -m torch_testing_ext.upstream pull-request NNNN --checkout PATH` loads this module. The commit has the patch of
that number and its test, in the file of PyTorch's `test/` that the test names. Its author and committer are those of
git's configuration.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# First: it says how to install libcst.
from torch_testing_ext.upstream.libcst_parts import (
    AddImportsVisitor,
    CodemodContext,
    get_full_name_for_node,
    libcst as cst,
)

# isort: split
import checkout_git
import hardware_rules
import outgoing
import patch_series

from torch_testing_ext.upstream import defined_names
from torch_testing_ext.upstream.mapping import THEIR_KIT, UserError, source_of

# The file of PyTorch's to which a test belongs, as the test says at its top.
_TARGET = re.compile(r"^# In PyTorch: (\S+)$", re.MULTILINE)
WIDTH = 88
_CLASSIFICATION = "HardwareClassification"
_DECLARATION = "    hw_classification = HardwareClassification.GENERIC\n"


def target_of(test: Path) -> Path:
    """The file of PyTorch's to which a test belongs."""
    found = _TARGET.search(test.read_text(encoding="utf-8"))
    if found is None:
        raise UserError(f"{test} does not say where it belongs: `# In PyTorch: test/...` is missing at its top")
    return Path(found[1])


# -- a test in a file of PyTorch's


def merged(test: str, target: str, classify: bool) -> str:
    """A file of PyTorch's with a test of ours at the end of the test's class, or with its class at the end of the file.

    `classify`: say of new classes that they need no device, as PyTorch's linter asks.
    """
    ours, theirs = cst.parse_module(test), cst.parse_module(target)
    classes = {node.name.value for node in theirs.body if isinstance(node, cst.ClassDef)}
    needed: list[_Import] = []
    methods: dict[str, list[cst.BaseStatement]] = {}
    new: list[cst.BaseStatement] = []
    for statement in ours.body:
        if isinstance(statement, cst.ClassDef) and statement.name.value in classes:
            methods[statement.name.value] = list(_functions(statement))
        elif isinstance(statement, cst.If) or _names_in(statement) & classes:
            continue  # the call of run_tests, and what the file says of its own classes
        elif imports := list(_imports_of(statement)):
            needed += imports
        elif isinstance(statement, cst.SimpleStatementLine | cst.FunctionDef | cst.ClassDef):
            if classify and isinstance(statement, cst.ClassDef):
                statement = _classified(statement)
                needed.append(_Import(f"{THEIR_KIT}.common_utils", _CLASSIFICATION, None))
            new.append(statement.with_changes(leading_lines=_blank(statement, 2)))
    body: list[cst.BaseStatement] = []
    for each in theirs.body:
        added = methods.get(each.name.value, []) if isinstance(each, cst.ClassDef) else []
        body.append(_extended(cst.ensure_type(each, cst.ClassDef), added) if added else each)
    end = next((i for i, each in enumerate(body) if isinstance(each, cst.If) and _is_main(each)), len(body))
    module = theirs.with_changes(body=[*body[:end], *new, *body[end:]])
    return _with_imports(module, [each for each in needed if not each.is_in(target)]).code


class _Import(NamedTuple):
    """What one import of a file binds."""

    module: str
    name: str | None  # None: the module itself
    alias: str | None

    def is_in(self, source: str) -> bool:
        """Whether a file binds it already, be it below an `if`."""
        if self.name is None and self.alias is None:
            return re.search(rf"^\s*import {re.escape(self.module)}$", source, re.MULTILINE) is not None
        statements = defined_names.statements(ast.parse(source).body)
        return (self.alias or self.name) in {name for each in statements for name, _ in defined_names.bound_by(each)}

    def __str__(self) -> str:
        """As it is written among the names of one statement."""
        return f"{self.name} as {self.alias}" if self.alias else str(self.name)


def _imports_of(statement: cst.CSTNode) -> Iterator[_Import]:
    line = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(line, cst.Import | cst.ImportFrom) and not isinstance(line.names, cst.ImportStar):
        module = get_full_name_for_node(line.module) if isinstance(line, cst.ImportFrom) and line.module else None
        for each in line.names:
            name, alias = each.evaluated_name, each.evaluated_alias
            yield _Import(module or name, name if module else None, alias)


def _with_imports(module: cst.Module, needed: Sequence[_Import]) -> cst.Module:
    """Add names to statements that import from their modules, and new statements for the others."""
    adder = _Adder(needed)
    module = module.visit(adder)
    context = CodemodContext()
    for each in needed:
        if each not in adder.added:
            AddImportsVisitor.add_needed_import(context, each.module, each.name, each.alias)
    return AddImportsVisitor(context).transform_module(module)


class _Adder(cst.CSTTransformer):
    """Adds names to the statements at the top level of a file that import from their modules."""

    def __init__(self, needed: Sequence[_Import]):
        super().__init__()
        self._needed = needed
        self.added: set[_Import] = set()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        new = {each for each in self._needed if each.module == module and each.name} - self.added
        names = original_node.names
        if not new or isinstance(names, cst.ImportStar) or "#" in cst.Module([]).code_for_node(original_node):
            return updated_node
        self.added |= new
        there = [_Import(str(module), each.evaluated_name, each.evaluated_alias) for each in names]
        words = sorted(map(str, {*there, *new}), key=str.casefold)
        line = f"from {module} import {', '.join(words)}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n    " + ",\n    ".join(words) + ",\n)"
        return cst.ensure_type(
            cst.ensure_type(cst.parse_statement(line), cst.SimpleStatementLine).body[0], cst.ImportFrom
        )


def _functions(node: cst.ClassDef) -> Iterator[cst.FunctionDef]:
    return (each for each in node.body.body if isinstance(each, cst.FunctionDef))


def _extended(node: cst.ClassDef, added: Sequence[cst.BaseStatement]) -> cst.ClassDef:
    """A class with the functions that it lacks. A test of the same name is an error."""
    has = {each.name.value for each in _functions(node)}
    functions = [cst.ensure_type(each, cst.FunctionDef) for each in added]
    if twice := [each.name.value for each in functions if each.name.value in has and each.name.value[:5] == "test_"]:
        raise UserError(f"{node.name.value} of the checkout has {', '.join(twice)} already")
    lacking = [each for each in functions if each.name.value not in has]
    body = [*node.body.body, *(each.with_changes(leading_lines=_blank(each, 1)) for each in lacking)]
    return node.with_changes(body=node.body.with_changes(body=body))


def _classified(node: cst.ClassDef) -> cst.ClassDef:
    """A class that says that it needs no device."""
    if not any(each.name.value.startswith("test_") for each in _functions(node)):
        return node
    [declared] = cst.parse_module(f"class C:\n{_DECLARATION}").body
    first = cst.ensure_type(declared, cst.ClassDef).body.body[0]
    rest = list(node.body.body)
    at = 1 if node.get_docstring() is not None else 0
    blank = [cst.EmptyLine(indent=False)]
    if at:
        first = first.with_changes(leading_lines=blank)
    if at < len(rest) and isinstance(rest[at], cst.FunctionDef):
        rest[at] = rest[at].with_changes(leading_lines=blank)
    return node.with_changes(body=node.body.with_changes(body=[*rest[:at], first, *rest[at:]]))


def _blank(statement: cst.CSTNode, count: int) -> list[cst.EmptyLine]:
    """This many blank lines, and the comments above a statement."""
    above = [line for line in getattr(statement, "leading_lines", ()) if line.comment is not None]
    return [*[cst.EmptyLine(indent=False)] * count, *above]


def _names_in(statement: cst.CSTNode) -> set[str]:
    """The names that a plain statement, such as a call for each device, mentions."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return set()
    return set(re.findall(r"\w+", cst.Module([statement]).code))


def _is_main(node: cst.If) -> bool:
    return "__main__" in cst.Module([node.with_changes(body=cst.IndentedBlock([cst.parse_statement("pass")]))]).code


# -- the commit


@dataclass(frozen=True)
class PullRequest:
    """A branch with one commit: its message, and the new contents of files, by their paths in the checkout."""

    branch: str
    title: str
    body: str
    contents: Mapping[Path, bytes]


def for_patch(patch: patch_series.SeriesPatch, checkout: Path) -> PullRequest:
    """The pull request of a patch and its test, for a checkout as it is now."""
    paths, target = list(patch_series.files_of(patch)), target_of(patch.test)
    if changed := _git(checkout, "status", "--porcelain", "--", *map(str, [*paths, target])):
        raise UserError(f"{checkout} has changes in files of the patch; commit or restore them first:\n{changed}")
    with tempfile.TemporaryDirectory() as directory:
        for path in paths:
            _existing(checkout / path)
            Path(directory, path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / path, Path(directory, path))
        try:
            patch_series.git([str(patch.file.absolute())], Path(directory))
        except UserError as error:
            raise UserError(f"{error}\nIf it follows another patch, make its commit on that one's branch") from None
        contents = {path: Path(directory, path).read_bytes() for path in paths}
    before = _existing(checkout / target)
    utilities = source_of(f"{THEIR_KIT}.common_utils", checkout)
    classify = utilities is not None and _CLASSIFICATION in defined_names.defined_in(utilities)
    after = merged(patch.test.read_text(encoding="utf-8"), before.decode(), classify)
    contents[target] = outgoing.formatted(after.encode(), before)
    text = patch.file.read_text(encoding="utf-8")
    body = text[: text.index("\n---\n")].partition("\n\n")[2]
    return PullRequest(patch.slug, patch.subject, body, contents)


def _existing(file: Path) -> bytes:
    if not file.is_file():
        raise UserError(f"{file} does not exist: PyTorch has moved it, so the patch or its test needs another path")
    return file.read_bytes()


def newly_broken(request: PullRequest, checkout: Path) -> list[str]:
    """The rules of the checkout's linter for tests that the commit would break, and that are kept now."""
    found = []
    for path, source in request.contents.items():
        if path.parts[0] == "test":
            before = {_rule(each) for each in hardware_rules.violations(path, _existing(checkout / path), checkout)}
            after = hardware_rules.violations(path, source, checkout)
            found += [f"{path}, {each}" for each in after if _rule(each) not in before]
    return found


def _rule(violation: str) -> str:
    """A violation without its line."""
    return violation.partition(": ")[2]


def commit(request: PullRequest, checkout: Path, issue: int | None) -> str:
    """Commit on a new branch, and return the committer. Without one, write nothing."""
    names = [path.as_posix() for path in request.contents]
    committer = _git(checkout, "-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT").rpartition(" ")[0]
    _git(checkout, "switch", "--quiet", "--create", request.branch)
    for path, source in request.contents.items():
        (checkout / path).write_bytes(source)
    _git(checkout, "add", "--", *names)
    fixes = f"Fixes #{issue}\n\n" if issue else ""
    message = f"{request.title}\n\n{fixes}{request.body.strip()}\n"
    _git(
        checkout, "-c", "user.useConfigOnly=true", "commit", "--quiet", "--cleanup=whitespace", "-F", "-", stdin=message
    )
    return committer.rpartition(" ")[0]


def _git(checkout: Path, *words: str, stdin: str = "") -> str:
    done = checkout_git.run_git(words, checkout, stdin.encode())
    if done.returncode != 0:
        raise UserError(f"git: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode().strip()


def _fork(checkout: Path) -> str:
    """The remote to push to: the first that is not PyTorch's own repository."""
    for name in _git(checkout, "remote").split():
        if not re.search(r"[:/]pytorch/pytorch(\.git)?/?$", _git(checkout, "remote", "get-url", name)):
            return name
    return "YOUR_FORK"


# -- the command


def main(words: Sequence[str], prog: str) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.description = (
        "Commit a patch of the series with its test in a checkout of PyTorch, on a new branch from where the checkout "
        "is, and say what to push. The author is that of git's configuration. Needs git."
    )
    parser.add_argument("number", metavar="NNNN", help="the number of the patch, such as 0003")
    parser.add_argument("--checkout", type=Path, required=True, metavar="PATH", help="a git checkout of PyTorch's main")
    parser.add_argument("--issue", type=int, metavar="N", help="the issue that it fixes")
    parser.add_argument(
        "--series", type=Path, default=Path("patches"), metavar="DIR", help="the directory (default: patches)"
    )
    options = parser.parse_args(words)
    outgoing.check_checkout(options.checkout)
    patch = patch_series.numbered(options.series, options.number)
    request = for_patch(patch, options.checkout)
    if broken := newly_broken(request, options.checkout):
        raise UserError("PyTorch's linter (TEST_LINTER) would refuse this:\n" + "\n".join(broken))
    committer = commit(request, options.checkout, options.issue)
    _show(request, patch, options, committer)
    return 0


def _show(request: PullRequest, patch: patch_series.SeriesPatch, options: argparse.Namespace, committer: str) -> None:
    print(f"{request.title}\non branch {request.branch}, by {committer}:")
    print("\n".join(f"  {path}" for path in request.contents))
    if options.issue is None:
        print(f"It names no issue. Post {options.series}/issues/{patch.number:04}-{patch.slug}.md,")
        print("then `git commit --amend`, and begin the text with: Fixes #NUMBER")
    print("Next, in the checkout:")
    print(f"  python {target_of(patch.test).as_posix()}")
    print("  lintrunner -a")
    print(f"  git push {_fork(options.checkout)} {request.branch}")
    print("The title and the text of the pull request are those of the commit.")
