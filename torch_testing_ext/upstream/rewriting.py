"""Rewrites a test file's imports from one side to the other.

Only names of modules change; all other bytes are copied. libcst finds the names: in `from M import ...`,
`import M [as m]`, `from PARENT import M`, in the dotted uses of a plain `import M`, and in strings passed to
functions that take the name of a module (mock.patch, import_module).
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .libcst_parts import (
    ByteSpanPositionProvider,
    CodeSpan,
    MetadataWrapper,
    PositionProvider,
    get_full_name_for_node,
    libcst as cst,
)
from .mapping import OUR_KIT, THEIR_KIT, Side, UserError, module_on, split_name

# Functions whose first argument is the dotted name of a module or of something in a module.
TAKE_A_NAME = {"patch", "dict", "multiple", "import_module", "__import__", "importorskip", "find_spec", "resolve_name"}
STAR = "*"


@dataclass(frozen=True)
class Use:
    """A name that the file uses from a module, both after rewriting. An empty name means the module itself."""

    module: str
    name: str
    line: int


@dataclass(frozen=True)
class RewrittenFile:
    """A rewritten file, the names that it uses, and the imports that were left unchanged."""

    source: bytes
    uses: tuple[Use, ...]
    # Imports of these modules that were left unchanged, and why.
    notes: tuple[str, ...]


def rewrite_file(source: bytes, side: Side, path: Path, finder_class: type[Finder] | None = None) -> RewrittenFile:
    """Rewrite a file for `side`. Raises UserError if it is not valid Python."""
    encoding, text = _decode(source, path)
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise UserError(f"{path}:{error.raw_line}: not valid Python, so nothing was changed: {error.message}") from None
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    spans = wrapper.resolve(ByteSpanPositionProvider)
    places = wrapper.resolve(PositionProvider)
    finder = (finder_class or Finder)(side, spans, places)
    wrapper.module.visit(finder)
    raw = text.encode()
    finder.finish(raw)
    rewritten = _spliced(raw, finder.edits).decode().encode(encoding)
    return RewrittenFile(rewritten, tuple(finder.uses), tuple(finder.notes))


def _decode(source: bytes, path: Path) -> tuple[str, str]:
    """The file's encoding, which the file may declare, and its text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return encoding, source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be decoded, so nothing was changed: {error}") from None


def _spliced(raw: bytes, edits: Mapping[int, Edit]) -> bytes:
    """A source with its edits made, each at its offset."""
    parts = []
    end = 0
    for start, edit in sorted(edits.items()):
        parts.append(raw[end:start])
        parts.append(edit.new.encode())
        end = start + len(edit.old.encode())
    parts.append(raw[end:])
    return b"".join(parts)


@dataclass(frozen=True)
class Edit:
    """The replacement of a text at its place."""

    old: str
    new: str


@dataclass
class Finder(cst.CSTVisitor):
    """Collects the edits to make and the names that the file uses from each module."""

    side: Side
    spans: Mapping[cst.CSTNode, CodeSpan]
    places: Mapping[cst.CSTNode, Any]
    edits: dict[int, Edit] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Of each plain `import a.b.c`. The file then writes a.b.c.name, and may also use `a`, which the import binds.
    _plain: list[cst.ImportAlias] = field(default_factory=list)
    _dotted: list[tuple[cst.Attribute, str]] = field(default_factory=list)
    # Names that other imports bind.
    _bound: set[str] = field(default_factory=set)
    # The new name of a module, by its alias.
    _aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    # -- imports

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.module is None or node.relative:
            return False
        module = get_full_name_for_node(node.module)
        if module is None:
            return False
        counterpart = module_on(self.side, module)
        if counterpart is None:
            self._from_package(node, module)
            return False
        self.edit(node.module, module, counterpart)
        for name in names_of(node) or [STAR]:
            self._use(node, counterpart, name)
        return False

    def _from_package(self, node: cst.ImportFrom, package: str) -> None:
        """Handle `from package import module, another`: all, some or none of the modules may have a counterpart."""
        pairs = self.pairs_of(node, package)
        counterparts = {alias: new for alias, new in pairs.items() if new is not None}
        are_some = 0 < len(counterparts) < len(pairs)
        if are_some and not is_plain(node):
            names = ", ".join(alias.evaluated_name for alias in counterparts)
            self._note(node, f"only {names} of this import has a counterpart; import it in a separate statement")
        elif counterparts:
            self._split(node, package, pairs)
            for alias, new in counterparts.items():
                bound = alias.evaluated_alias or alias.evaluated_name
                self._aliases[bound] = new
                self._use(node, new)
        if not of_the_other_kit(package, self.side):
            return
        if not pairs:
            self._use(node, package, STAR)
        for alias in pairs:
            if alias not in counterparts:
                self._use(node, package, alias.evaluated_name)

    def pairs_of(self, node: cst.ImportFrom, package: str) -> dict[cst.ImportAlias, str | None]:
        """The modules that a package is to give, each with its counterpart, if it has one."""
        pairs = {}
        for alias in aliases_of(node):
            module = f"{package}.{alias.evaluated_name}"
            pairs[alias] = module_on(self.side, module)
        return pairs

    def _split(self, node: cst.ImportFrom, package: str, pairs: dict[cst.ImportAlias, str | None]) -> None:
        """Import each module from its new package: `from p import a; from q import b`."""
        current = package
        last: cst.ImportAlias | None = None
        for alias, new in pairs.items():
            wanted = package if new is None else new.rpartition(".")[0]
            if wanted != current:
                if last is None:
                    self.edit(node.module, package, wanted)
                else:
                    self.edits[self.end_of(last)] = Edit(", ", f"; from {wanted} import ")
            current = wanted
            last = alias

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            self._import(node, alias)
        return False

    def _import(self, node: cst.Import, alias: cst.ImportAlias) -> None:
        module = alias.evaluated_name
        counterpart = module_on(self.side, module)
        if counterpart is None:
            top = module.partition(".")[0]
            self._bound.add(alias.evaluated_alias or top)
            if of_the_other_kit(module, self.side):
                self._use(node, module)
        elif alias.evaluated_alias is None:
            self._plain.append(alias)
        else:
            self.edit(alias.name, module, counterpart)
            self._aliases[alias.evaluated_alias] = counterpart
            self._use(node, counterpart)

    # -- uses

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        dotted = get_full_name_for_node(node)
        if dotted is None:
            return True
        head, _, rest = dotted.partition(".")
        if head in self._aliases:
            self._use(node, self._aliases[head], rest)
        elif split_name(dotted, self.side) is not None:
            self._dotted.append((node, dotted))
        return False

    def visit_Call(self, node: cst.Call) -> None:
        function = node.func
        if isinstance(function, cst.Attribute):
            function = function.attr
        if not isinstance(function, cst.Name) or function.value not in TAKE_A_NAME:
            return
        if not node.args:
            return
        first = node.args[0].value
        if isinstance(first, cst.SimpleString) and "b" not in first.prefix.lower():
            self._string(first)

    def _string(self, node: cst.SimpleString) -> None:
        parts = split_name(node.raw_value, self.side)
        if parts is None:
            return
        module, rest = parts
        counterpart = self._counterpart(module)
        opening = f"{node.prefix}{node.quote}"
        start = self._start_of(node) + len(opening)
        self.edits[start] = Edit(module, counterpart)
        self._use(node, counterpart, rest)

    # -- after the visit

    def finish(self, raw: bytes) -> None:
        """Edit plain imports where possible, and drop edits of unusual spelling, which could not be reverted."""
        taken = set()
        for alias in self._plain:
            if self._take_plain(alias):
                taken.add(alias.evaluated_name)
        for node, dotted in self._dotted:
            parts = split_name(dotted, self.side)
            assert parts is not None
            module, rest = parts
            if module in taken:
                counterpart = self._counterpart(module)
                self.edit(node, module, counterpart)
                self._use(node, counterpart, rest)
        for start, edit in list(self.edits.items()):
            if not raw.startswith(edit.old.encode(), start):
                del self.edits[start]
                line = raw.count(b"\n", 0, start) + 1
                self.notes.append(f"line {line}: {edit.old} is written with spaces in it, so it was left unchanged")

    def _take_plain(self, alias: cst.ImportAlias) -> bool:
        """Edit a plain import, unless the file also needs the package that it binds."""
        module = alias.evaluated_name
        counterpart = self._counterpart(module)
        top = module.partition(".")[0]
        if self.side is Side.OURS and top not in self._bound:
            self._note(alias, f"this import also binds {top!r}, which nothing else imports; add `import {top}`")
            return False
        self.edit(alias.name, module, counterpart)
        self._use(alias, counterpart)
        return True

    def _use(self, node: cst.CSTNode, module: str, dotted: str = "") -> None:
        """Note that a module is used, or the name in it with which `dotted` begins."""
        name = dotted.partition(".")[0]
        self.uses.append(Use(module, name, self._line(node)))

    def edit(self, node: cst.CSTNode | None, old: str, new: str) -> None:
        assert node is not None
        self.edits[self._start_of(node)] = Edit(old, new)

    def _counterpart(self, module: str) -> str:
        """The counterpart of a module that has one."""
        counterpart = module_on(self.side, module)
        assert counterpart is not None
        return counterpart

    def _note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.append(f"line {self._line(node)}: {text}")

    def _start_of(self, node: cst.CSTNode) -> int:
        return self.spans[node].start

    def end_of(self, node: cst.CSTNode) -> int:
        span = self.spans[node]
        return span.start + span.length

    def _line(self, node: cst.CSTNode) -> int:
        line: int = self.places[node].start.line
        return line


def aliases_of(node: cst.ImportFrom) -> list[cst.ImportAlias]:
    if isinstance(node.names, cst.ImportStar):
        return []
    return list(node.names)


def names_of(node: cst.ImportFrom) -> list[str]:
    return [alias.evaluated_name for alias in aliases_of(node)]


def is_plain(node: cst.ImportFrom) -> bool:
    """Whether its names are on one line, separated by a comma and a space."""
    if node.lpar is not None:
        return False
    return all(_is_plain_comma(alias.comma) for alias in aliases_of(node)[:-1])


def _is_plain_comma(comma: cst.Comma | cst.MaybeSentinel) -> bool:
    if not isinstance(comma, cst.Comma):
        return False
    return _text(comma.whitespace_before) == "" and _text(comma.whitespace_after) == " "


def _text(space: cst.BaseParenthesizableWhitespace) -> str:
    return space.value if isinstance(space, cst.SimpleWhitespace) else "\n"


def of_the_other_kit(module: str, side: Side) -> bool:
    kit = THEIR_KIT if side is Side.OURS else OUR_KIT
    return module == kit or module.startswith(f"{kit}.")


def only_of_their_side(uses: tuple[Use, ...], side: Side) -> Iterator[Use]:
    """The uses of modules that have no counterpart on `side`, and so were left unchanged."""
    return (use for use in uses if of_the_other_kit(use.module, side))
