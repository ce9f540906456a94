"""Converts a file by the rules of a project. All but the statements that change keeps its bytes."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

from torch_testing_ext.upstream.mapping import Side
from torch_testing_ext.upstream.rewriting import rewrite

from .projects import Project

_RANKS = "torch_testing_ext.ranks"


@dataclass(frozen=True)
class Converted:
    """A file after its conversion, with the lines in which something is left to do by hand."""

    source: bytes
    by_hand: tuple[tuple[int, str], ...]


def convert(source: bytes, project: Project, path: Path) -> Converted:
    """Convert a file. Raises an exception if it cannot be read completely."""
    notes: list[tuple[int, str]] = []
    if project.uses_torchs_kit:
        rewritten = rewrite(source, Side.OURS, path)
        source = rewritten.source
        notes += [(int(line), text) for line, text in re.findall(r"line (\d+): (.*)", "\n".join(rewritten.notes))]
    moved = {name for names in project.names.values() for name in names}
    words = {*(f"def {name}(" for name in project.functions), *project.by_hand, *moved}
    defines = re.search(rb"^(class|def) (%s)\b" % "|".join(moved).encode(), source, re.MULTILINE) if moved else None
    if not defines and any(word.encode() in source for word in words):
        source = _converted(source, project)
        notes += _left(source, project)
    return Converted(source, tuple(sorted(notes)))


def _converted(source: bytes, project: Project) -> bytes:
    converter = _Converter(project)
    module = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True).visit(converter)
    context = CodemodContext()
    for name in sorted(converter.needed):
        AddImportsVisitor.add_needed_import(context, _RANKS, name)
    return (AddImportsVisitor(context).transform_module(module) if converter.needed else module).bytes


def _left(source: bytes, project: Project) -> Iterator[tuple[int, str]]:
    """The lines of a converted file in which something is left to do."""
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if why := project.by_hand.get(token.string.strip("'\"")):
            yield token.start[0], f"{token.string}: {why}"
        star = re.match(r"\s*from\s+(\S+)\s+import\s+\*", token.line) if token.string == "*" else None
        if star and (names := _moved(project, star[1])):
            yield token.start[0], f"import {', '.join(names)} from {_RANKS}, after this"


def _moved(project: Project, module: str) -> dict[str, str]:
    """The names that move out of a module, as an import names it: it may have only the last parts of a rule's name."""
    parts = [part for part in module.split(".") if part]
    found: dict[str, str] = {}
    for rule, names in project.names.items():
        wanted = rule.split(".")
        length = len(parts) if module.startswith(".") else len(wanted)
        if parts and parts[-length:] == wanted[-length:]:
            found.update(names)
    return found


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
        only = updated_node.body[0] if len(updated_node.body) == 1 else None
        if not isinstance(only, cst.ImportFrom) or isinstance(only.names, cst.ImportStar):
            return updated_node
        names = _moved(self._project, "." * len(only.relative) + (get_full_name_for_node(only.module or "") or ""))
        taken = [alias for alias in only.names if alias.evaluated_name in names]
        rest = [alias for alias in only.names if alias not in taken]
        if not taken:
            return updated_node
        ours = _import_of(taken, names)
        if not rest:
            return updated_node.with_changes(body=[ours])
        if rest[-1] is not only.names[-1]:
            rest[-1] = rest[-1].with_changes(comma=_last(rest[-1].comma, only.names[-1].comma))
        return cst.FlattenSentinel(
            [updated_node.with_changes(body=[only.with_changes(names=rest)]), cst.SimpleStatementLine([ours])]
        )

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        for qualified in self.get_metadata(QualifiedNameProvider, original_node, ()):
            module, _, name = qualified.name.rpartition(".")
            ours = _moved(self._project, module).get(name)
            if ours is not None and original_node.attr.value == name:
                self.needed.add(ours)
                return cst.Name(ours)
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body = [new for statement in updated_node.body for new in self._of_function(updated_node, statement)]
        return updated_node.with_changes(body=body)

    def _of_function(self, module: cst.Module, statement: cst.BaseStatement) -> list[cst.BaseStatement]:
        if not isinstance(statement, cst.FunctionDef):
            return [statement]
        rules = self._project.functions.get(statement.name.value, ())
        text = new = module.code_for_node(statement.with_changes(leading_lines=())) if rules else ""
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new, count=1, flags=re.DOTALL)
        if new == text:
            return [statement]
        first, *others = cst.parse_module(new, module.config_for_parsing).body
        return [first.with_changes(leading_lines=statement.leading_lines), *others]


def _import_of(aliases: list[cst.ImportAlias], names: Mapping[str, str]) -> cst.ImportFrom:
    words = []
    for alias in aliases:
        ours, bound = names[alias.evaluated_name], alias.evaluated_alias or alias.evaluated_name
        words.append(ours if ours == bound else f"{ours} as {bound}")
    line = cst.ensure_type(cst.parse_statement(f"from {_RANKS} import {', '.join(words)}"), cst.SimpleStatementLine)
    return cst.ensure_type(line.body[0], cst.ImportFrom)


def _last(comma: Any, before: Any) -> Any:
    """The comma of a name that becomes the last: it keeps its comment, and has the layout of the last one `before`."""
    mine, last = (getattr(each, "whitespace_after", None) for each in (comma, before))
    if not isinstance(mine, cst.ParenthesizedWhitespace) or not isinstance(last, cst.ParenthesizedWhitespace):
        return before
    return comma.with_changes(whitespace_after=mine.with_changes(indent=last.indent, last_line=last.last_line))
