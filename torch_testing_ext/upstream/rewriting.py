"""Rewrite a test file's imports from one side to the other, and nothing else: what is not a module's name stays, byte
for byte. libcst finds the names; the bytes between them are copied.

A module is rewritten in `from M import ...`, `import M [as m]`, `from PARENT import M`, in the dotted uses that a plain
`import M` is for, and in strings that are handed to those who take a module's name (mock.patch, import_module).
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from .mapping import OUR_KIT, THEIR_KIT, Mistake, Side, module_on, split

try:
    import libcst as cst
    from libcst.helpers import get_full_name_for_node
    from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper, PositionProvider
except ImportError as error:
    raise Mistake(f"this needs libcst: pip install 'torch-testing-ext[upstream]' ({error})") from None

# Functions whose first argument is the name of a module, or of something in one.
TAKE_A_NAME = {"patch", "dict", "multiple", "import_module", "__import__", "importorskip", "find_spec", "resolve_name"}
STAR = "*"


@dataclass(frozen=True)
class Use:
    """A name that the file wants of a module, as both are called after rewriting. No name: the module itself."""

    module: str
    name: str
    line: int


@dataclass(frozen=True)
class Rewritten:
    source: bytes
    uses: tuple[Use, ...]
    notes: tuple[str, ...]  # what stayed as it was though it is about these modules, and why


def rewrite(source: bytes, side: Side, path: Path) -> Rewritten:
    """The file for `side`. Raises Mistake where it is no Python."""
    encoding, text = _decode(source, path)
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise Mistake(f"{path}:{error.raw_line}: this is no Python, so nothing was changed: {error.message}") from None
    finder = _Finder(side, wrapper.resolve(ByteSpanPositionProvider), wrapper.resolve(PositionProvider))
    wrapper.module.visit(finder)
    raw = text.encode()
    finder.settle(raw)
    return Rewritten(_spliced(raw, finder.edits).decode().encode(encoding), tuple(finder.uses), tuple(finder.notes))


def _decode(source: bytes, path: Path) -> tuple[str, str]:
    """The file's encoding, which it may name itself, and its text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return encoding, source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Mistake(f"{path} cannot be read as text, so nothing was changed: {error}") from None


def _spliced(raw: bytes, edits: Mapping[int, _Edit]) -> bytes:
    parts, at = [], 0
    for start, edit in sorted(edits.items()):
        parts += [raw[at:start], edit.new.encode()]
        at = start + len(edit.old.encode())
    return b"".join([*parts, raw[at:]])


@dataclass(frozen=True)
class _Edit:
    old: str
    new: str


@dataclass
class _Plain:
    """A plain `import a.b.c`, which makes the file write a.b.c.name. It binds `a`, which may be needed for itself."""

    node: cst.ImportAlias
    module: str


@dataclass
class _Finder(cst.CSTVisitor):
    """Collects what is to be edited, and which names are wanted of which module."""

    side: Side
    spans: Mapping[cst.CSTNode, CodeSpan]
    places: Mapping[cst.CSTNode, Any]
    edits: dict[int, _Edit] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _plain: list[_Plain] = field(default_factory=list)
    _dotted: list[tuple[cst.Attribute, str]] = field(default_factory=list)
    _bound: set[str] = field(default_factory=set)  # by other imports
    _aliases: dict[str, str] = field(default_factory=dict)  # a name for a module, by its new name
    _merged: set[cst.ImportFrom] = field(default_factory=set)  # into the statement before

    def __post_init__(self) -> None:
        super().__init__()

    # -- imports

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = get_full_name_for_node(node.module) if node.module and not node.relative else None
        if module is None:
            return False
        counterpart = module_on(self.side, module)
        if counterpart is not None:
            self._edit(node.module, module, counterpart)
            self._uses_of(node, counterpart)
        else:
            self._from_package(node, module)
        return False

    def _uses_of(self, node: cst.ImportFrom, module: str) -> None:
        for alias in _aliases_of(node):
            self.uses.append(Use(module, alias.evaluated_name, self._line(node)))
        if isinstance(node.names, cst.ImportStar):
            self.uses.append(Use(module, STAR, self._line(node)))

    def _from_package(self, node: cst.ImportFrom, package: str) -> None:
        """`from package import module, another`, of which all, some or none have a counterpart."""
        pairs = self._pairs_of(node, package)
        found = {alias: new for alias, new in pairs.items() if new is not None}
        if found and len(found) < len(pairs) and not _is_plain(node):
            there = ", ".join(alias.evaluated_name for alias in found)
            self._note(node, f"only {there} of this import has a counterpart: give it a statement of its own")
        elif found:
            self._split(node, package, pairs)
            for alias, new in found.items():
                self._aliases[alias.evaluated_alias or alias.evaluated_name] = new
                self.uses.append(Use(new, "", self._line(node)))
        if _of_the_other_kit(package, self.side):
            alone = [alias.evaluated_name for alias in pairs if alias not in found]
            without_names = [] if pairs else [STAR]
            self.uses.extend(Use(package, name, self._line(node)) for name in alone or without_names)

    def _pairs_of(self, node: cst.ImportFrom, package: str) -> dict[cst.ImportAlias, str | None]:
        return {alias: module_on(self.side, f"{package}.{alias.evaluated_name}") for alias in _aliases_of(node)}

    def _split(self, node: cst.ImportFrom, package: str, pairs: dict[cst.ImportAlias, str | None]) -> None:
        """Import each module from the package it is in then: `from p import a; from q import b`."""
        packages = {alias: new.rpartition(".")[0] if new else package for alias, new in pairs.items()}
        first = next(iter(packages.values()))
        if node not in self._merged and first != package:
            self._edit(node.module, package, first)
        for before, after in pairwise(pairs):
            if packages[before] != packages[after]:
                self.edits[self._end(before)] = _Edit(", ", f"; from {packages[after]} import ")

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._merge(node.body)

    def visit_SimpleStatementSuite(self, node: cst.SimpleStatementSuite) -> None:
        self._merge(node.body)

    def _merge(self, line: Sequence[cst.BaseSmallStatement]) -> None:
        """The way back from `_split`: statements that import from the same package of PyTorch's become one."""
        for before, after in pairwise(line) if self.side is Side.THEIRS else ():
            target = self._package_there(before)
            if target is not None and target == self._package_there(after):
                assert isinstance(before, cst.ImportFrom) and isinstance(after, cst.ImportFrom)
                package = get_full_name_for_node(after.module or "")
                self.edits[self._end(_aliases_of(before)[-1])] = _Edit(f"; from {package} import ", ", ")
                self._merged.add(after)

    def _package_there(self, node: cst.BaseSmallStatement) -> str | None:
        """The package of PyTorch's that a statement imports nothing but modules from, written as `_split` does."""
        if not isinstance(node, cst.ImportFrom) or not node.module or node.relative or not _is_plain(node):
            return None
        package = get_full_name_for_node(node.module) or ""
        new = {new and new.rpartition(".")[0] for new in self._pairs_of(node, package).values()}
        if new == {None} and _of_the_other_kit(package, Side.OURS):
            return package
        return new.pop() if len(new) == 1 else None

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            self._import(node, alias)
        return False

    def _import(self, node: cst.Import, alias: cst.ImportAlias) -> None:
        module = alias.evaluated_name
        counterpart = module_on(self.side, module)
        if counterpart is None:
            self._bound.add(alias.evaluated_alias or module.partition(".")[0])
            if _of_the_other_kit(module, self.side):
                self.uses.append(Use(module, "", self._line(node)))
        elif alias.asname is None:
            self._plain.append(_Plain(alias, module))
        else:
            self._edit(alias.name, module, counterpart)
            self._aliases[alias.evaluated_alias or ""] = counterpart
            self.uses.append(Use(counterpart, "", self._line(node)))

    # -- uses

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        dotted = get_full_name_for_node(node)
        if dotted is None:
            return True
        head, _, rest = dotted.partition(".")
        if head in self._aliases:
            self.uses.append(Use(self._aliases[head], rest.partition(".")[0], self._line(node)))
        elif split(dotted, self.side) is not None:
            self._dotted.append((node, dotted))
        return False

    def visit_Call(self, node: cst.Call) -> None:
        function = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        first = node.args[0].value if node.args else None
        if isinstance(function, cst.Name) and function.value in TAKE_A_NAME and isinstance(first, cst.SimpleString):
            self._string(first)

    def _string(self, node: cst.SimpleString) -> None:
        found = split(node.raw_value, self.side) if "b" not in node.prefix.lower() else None
        if found is None:
            return
        module, rest = found
        counterpart = module_on(self.side, module)
        assert counterpart is not None
        start = self.spans[node].start + len(node.prefix) + len(node.quote)
        self.edits[start] = _Edit(module, counterpart)
        self.uses.append(Use(counterpart, rest.partition(".")[0], self._line(node)))

    # -- when all is seen

    def settle(self, raw: bytes) -> None:
        """Decide on plain imports, and leave alone what is written so oddly that it could not be brought back."""
        taken = {one.module for one in self._plain if self._take_plain(one)}
        for node, dotted in self._dotted:
            module, rest = split(dotted, self.side) or ("", "")
            counterpart = module_on(self.side, module)
            if module in taken and counterpart is not None:
                self._edit(node, module, counterpart)
                self.uses.append(Use(counterpart, rest.partition(".")[0], self._line(node)))
        for start, edit in list(self.edits.items()):
            if not raw[start:].startswith(edit.old.encode()):
                del self.edits[start]
                self.notes.append(
                    f"line {raw[:start].count(10) + 1}: {edit.old} is written with spaces in it: it stays"
                )

    def _take_plain(self, one: _Plain) -> bool:
        counterpart = module_on(self.side, one.module)
        assert counterpart is not None
        top = one.module.partition(".")[0]
        if self.side is Side.OURS and top not in self._bound:
            self._note(one.node, f"this import also binds {top!r}, which nothing else imports: add `import {top}`")
            return False
        self._edit(one.node.name, one.module, counterpart)
        self.uses.append(Use(counterpart, "", self._line(one.node)))
        return True

    def _edit(self, node: cst.CSTNode | None, old: str, new: str) -> None:
        assert node is not None
        self.edits[self.spans[node].start] = _Edit(old, new)

    def _note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.append(f"line {self._line(node)}: {text}")

    def _end(self, node: cst.CSTNode) -> int:
        return self.spans[node].start + self.spans[node].length

    def _line(self, node: cst.CSTNode) -> int:
        line: int = self.places[node].start.line
        return line


def _aliases_of(node: cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(node.names, cst.ImportStar) else list(node.names)


def _is_plain(node: cst.ImportFrom) -> bool:
    """Are its names on one line, with a comma and a space between them?"""
    commas = [alias.comma for alias in _aliases_of(node)[:-1]]
    return node.lpar is None and all(
        isinstance(comma, cst.Comma) and (_text(comma.whitespace_before), _text(comma.whitespace_after)) == ("", " ")
        for comma in commas
    )


def _text(space: cst.BaseParenthesizableWhitespace) -> str:
    return space.value if isinstance(space, cst.SimpleWhitespace) else "\n"


def _of_the_other_kit(module: str, side: Side) -> bool:
    kit = THEIR_KIT if side is Side.OURS else OUR_KIT
    return module == kit or module.startswith(f"{kit}.")


def only_of_their_side(uses: tuple[Use, ...], side: Side) -> Iterator[Use]:
    """The uses of modules that stayed, having no counterpart on `side`."""
    return (use for use in uses if _of_the_other_kit(use.module, side))
