"""Converts a file by the rules of a project. All but the statements that change keeps its bytes."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .libcst_parts import (
    AddImportsVisitor,
    CodemodContext,
    MetadataWrapper,
    QualifiedNameProvider,
    get_full_name_for_node,
    libcst as cst,
)
from .mapping import Side
from .other_projects import Project
from .rewriting import rewrite_file

_STAR_IMPORT = re.compile(r"\s*from\s+(\S+)\s+import\s+\*")


@dataclass(frozen=True)
class Converted:
    """A file after its conversion, with the lines in which something is left to do by hand."""

    source: bytes
    by_hand: tuple[tuple[int, str], ...]


def convert_file(source: bytes, project: Project, path: Path) -> Converted:
    """Convert a file. Raises an exception if it cannot be read completely."""
    notes: list[tuple[int, str]] = []
    if project.uses_torchs_kit:
        rewritten = rewrite_file(source, Side.OURS, path)
        source = rewritten.source
        for line, text in re.findall(r"line (\d+): (.*)", "\n".join(rewritten.notes)):
            notes.append((int(line), text))
    if _may_change(source, project):
        source = _converted(source, project)
        notes += _left(source, project)
    return Converted(source, tuple(sorted(notes)))


def _may_change(source: bytes, project: Project) -> bool:
    """Whether a rule may apply to a file. A file that defines the names that move is theirs: it stays."""
    moved = set().union(*project.names.values())
    if moved:
        names = "|".join(moved).encode()
        if re.search(rb"^(class|def) (%s)\b" % names, source, re.MULTILINE):
            return False
    words = (*project.by_hand, *moved)
    return any(word.encode() in source for word in words)


def _converted(source: bytes, project: Project) -> bytes:
    """A file after its names and imports have changed."""
    converter = _Converter(project)
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    module = wrapper.visit(converter)
    if converter.needed:
        context = CodemodContext()
        for name in sorted(converter.needed):
            AddImportsVisitor.add_needed_import(context, project.ours, name)
        module = AddImportsVisitor(context).transform_module(module)
    return module.bytes


def _left(source: bytes, project: Project) -> Iterator[tuple[int, str]]:
    """The lines of a converted file in which something is left to do."""
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        line, _ = token.start
        why = project.by_hand.get(token.string.strip("'\""))
        if why:
            yield line, f"{token.string}: {why}"
        if token.string != "*":
            continue
        star = _STAR_IMPORT.match(token.line)
        names = _moved(project, star[1]) if star else {}
        if names:
            yield line, f"import {', '.join(names)} from {project.ours}, after this"


def _moved(project: Project, module: str) -> dict[str, str]:
    """The names that move out of a module, as an import names it: it may have only the last parts of a rule's name."""
    parts = [part for part in module.split(".") if part]
    moved: dict[str, str] = {}
    for rule, names in project.names.items():
        wanted = rule.split(".")
        length = len(parts) if module.startswith(".") else len(wanted)
        if parts and parts[-length:] == wanted[-length:]:
            moved.update(names)
    return moved


class _Converter(cst.CSTTransformer):
    """Applies the rules, and collects the names that the file then needs from our package."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, project: Project):
        super().__init__()
        self._project = project
        self.needed: set[str] = set()

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Import the names that move from our package, in a statement of their own."""
        statement = updated_node.body[0] if len(updated_node.body) == 1 else None
        if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
            return updated_node
        names = _moved(self._project, _module_of(statement))
        taken = [alias for alias in statement.names if alias.evaluated_name in names]
        rest = [alias for alias in statement.names if alias not in taken]
        if not taken:
            return updated_node
        ours = _import_of(taken, names, self._project.ours)
        if not rest:
            return updated_node.with_changes(body=[ours])
        last = statement.names[-1]
        if rest[-1] is not last:
            rest[-1] = rest[-1].with_changes(comma=_last(rest[-1].comma, last.comma))
        theirs = updated_node.with_changes(body=[statement.with_changes(names=rest)])
        return cst.FlattenSentinel([theirs, cst.SimpleStatementLine([ours])])

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        for qualified in self.get_metadata(QualifiedNameProvider, original_node, ()):
            module, _, name = qualified.name.rpartition(".")
            ours = _moved(self._project, module).get(name)
            if ours is not None and original_node.attr.value == name:
                self.needed.add(ours)
                return cst.Name(ours)
        return updated_node


def _module_of(statement: cst.ImportFrom) -> str:
    """The module as the statement names it, with a dot for each package above."""
    dots = "." * len(statement.relative)
    name = None if statement.module is None else get_full_name_for_node(statement.module)
    return dots + (name or "")


def _import_of(aliases: list[cst.ImportAlias], names: Mapping[str, str], module: str) -> cst.ImportFrom:
    """The import of our names, bound as before."""
    words = []
    for alias in aliases:
        ours = names[alias.evaluated_name]
        bound = alias.evaluated_alias or alias.evaluated_name
        words.append(ours if ours == bound else f"{ours} as {bound}")
    parsed = cst.parse_statement(f"from {module} import {', '.join(words)}")
    line = cst.ensure_type(parsed, cst.SimpleStatementLine)
    return cst.ensure_type(line.body[0], cst.ImportFrom)


def _last(comma: Any, before: Any) -> Any:
    """The comma of a name that becomes the last: it keeps its comment, and has the layout of the last one `before`."""
    mine = getattr(comma, "whitespace_after", None)
    last = getattr(before, "whitespace_after", None)
    if not isinstance(mine, cst.ParenthesizedWhitespace) or not isinstance(last, cst.ParenthesizedWhitespace):
        return before
    return comma.with_changes(whitespace_after=mine.with_changes(indent=last.indent, last_line=last.last_line))
