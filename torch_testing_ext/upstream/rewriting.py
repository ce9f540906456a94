"""Rewrite a test file's imports from one side to the other.

Only names of modules change; all other bytes are copied. libcst finds the names: in `from M import ...`,
`import M [as m]`, `from PARENT import M`, in the dotted uses of a plain `import M`, and in strings passed to functions
that take the name of a module (mock.patch, import_module).
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_testing_ext._process import user_commands

from .mapping import OUR_KIT, THEIR_KIT, Side, UserError, module_on, split

try:
    import libcst as cst
    from libcst.helpers import get_full_name_for_node
    from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper, PositionProvider
except ImportError as error:
    raise UserError(f"this command needs libcst: {user_commands.install('upstream')} ({error})") from None

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
    notes: tuple[str, ...]  # imports of these modules that were left unchanged, and why


def rewrite(source: bytes, side: Side, path: Path, finder_class: type[Finder] | None = None) -> RewrittenFile:
    """Rewrite a file for `side`. Raises UserError if it is not valid Python."""
    encoding, text = _decode(source, path)
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise UserError(f"{path}:{error.raw_line}: not valid Python, so nothing was changed: {error.message}") from None
    finder = (finder_class or Finder)(
        side, wrapper.resolve(ByteSpanPositionProvider), wrapper.resolve(PositionProvider)
    )
    wrapper.module.visit(finder)
    raw = text.encode()
    finder.finish(raw)
    return RewrittenFile(_spliced(raw, finder.edits).decode().encode(encoding), tuple(finder.uses), tuple(finder.notes))


def _decode(source: bytes, path: Path) -> tuple[str, str]:
    """The file's encoding, which the file may declare, and its text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return encoding, source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be decoded, so nothing was changed: {error}") from None


def _spliced(raw: bytes, edits: Mapping[int, Edit]) -> bytes:
    parts, at = [], 0
    for start, edit in sorted(edits.items()):
        parts += [raw[at:start], edit.new.encode()]
        at = start + len(edit.old.encode())
    return b"".join([*parts, raw[at:]])


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
    _bound: set[str] = field(default_factory=set)  # names bound by other imports
    _aliases: dict[str, str] = field(default_factory=dict)  # alias of a module -> its new name

    def __post_init__(self) -> None:
        super().__init__()

    # -- imports

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = get_full_name_for_node(node.module) if node.module and not node.relative else None
        if module is None:
            return False
        counterpart = module_on(self.side, module)
        if counterpart is not None:
            self.edit(node.module, module, counterpart)
            names = [alias.evaluated_name for alias in aliases_of(node)] or [STAR]
            self.uses.extend(Use(counterpart, name, self._line(node)) for name in names)
        else:
            self._from_package(node, module)
        return False

    def _from_package(self, node: cst.ImportFrom, package: str) -> None:
        """Handle `from package import module, another`: all, some or none of the modules may have a counterpart."""
        pairs = self.pairs_of(node, package)
        found = {alias: new for alias, new in pairs.items() if new is not None}
        if found and len(found) < len(pairs) and not is_plain(node):
            names = ", ".join(alias.evaluated_name for alias in found)
            self._note(node, f"only {names} of this import has a counterpart; import it in a separate statement")
        elif found:
            self._split(node, package, pairs)
            for alias, new in found.items():
                self._aliases[alias.evaluated_alias or alias.evaluated_name] = new
                self.uses.append(Use(new, "", self._line(node)))
        if of_the_other_kit(package, self.side):
            alone = [alias.evaluated_name for alias in pairs if alias not in found]
            without_names = [] if pairs else [STAR]
            self.uses.extend(Use(package, name, self._line(node)) for name in alone or without_names)

    def pairs_of(self, node: cst.ImportFrom, package: str) -> dict[cst.ImportAlias, str | None]:
        return {alias: module_on(self.side, f"{package}.{alias.evaluated_name}") for alias in aliases_of(node)}

    def _split(self, node: cst.ImportFrom, package: str, pairs: dict[cst.ImportAlias, str | None]) -> None:
        """Import each module from its new package: `from p import a; from q import b`."""
        packages = {alias: new.rpartition(".")[0] if new else package for alias, new in pairs.items()}
        first = next(iter(packages.values()))
        if first != package:
            self.edit(node.module, package, first)
        for before, after in pairwise(pairs):
            if packages[before] != packages[after]:
                self.edits[self.end_of(before)] = Edit(", ", f"; from {packages[after]} import ")

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            self._import(node, alias)
        return False

    def _import(self, node: cst.Import, alias: cst.ImportAlias) -> None:
        module = alias.evaluated_name
        counterpart = module_on(self.side, module)
        if counterpart is None:
            self._bound.add(alias.evaluated_alias or module.partition(".")[0])
            if of_the_other_kit(module, self.side):
                self.uses.append(Use(module, "", self._line(node)))
        elif alias.asname is None:
            self._plain.append(alias)
        else:
            self.edit(alias.name, module, counterpart)
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
        self.edits[start] = Edit(module, counterpart)
        self.uses.append(Use(counterpart, rest.partition(".")[0], self._line(node)))

    # -- after the visit

    def finish(self, raw: bytes) -> None:
        """Edit plain imports where possible, and drop edits of unusual spelling, which could not be reverted."""
        taken = {alias.evaluated_name for alias in self._plain if self._take_plain(alias)}
        for node, dotted in self._dotted:
            module, rest = split(dotted, self.side) or ("", "")
            counterpart = module_on(self.side, module)
            if module in taken and counterpart is not None:
                self.edit(node, module, counterpart)
                self.uses.append(Use(counterpart, rest.partition(".")[0], self._line(node)))
        for start, edit in list(self.edits.items()):
            if not raw[start:].startswith(edit.old.encode()):
                del self.edits[start]
                line = raw[:start].count(10) + 1
                self.notes.append(f"line {line}: {edit.old} is written with spaces in it, so it was left unchanged")

    def _take_plain(self, alias: cst.ImportAlias) -> bool:
        module = alias.evaluated_name
        counterpart = module_on(self.side, module)
        assert counterpart is not None
        top = module.partition(".")[0]
        if self.side is Side.OURS and top not in self._bound:
            self._note(alias, f"this import also binds {top!r}, which nothing else imports; add `import {top}`")
            return False
        self.edit(alias.name, module, counterpart)
        self.uses.append(Use(counterpart, "", self._line(alias)))
        return True

    def edit(self, node: cst.CSTNode | None, old: str, new: str) -> None:
        assert node is not None
        self.edits[self.spans[node].start] = Edit(old, new)

    def _note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.append(f"line {self._line(node)}: {text}")

    def end_of(self, node: cst.CSTNode) -> int:
        return self.spans[node].start + self.spans[node].length

    def _line(self, node: cst.CSTNode) -> int:
        line: int = self.places[node].start.line
        return line


def aliases_of(node: cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(node.names, cst.ImportStar) else list(node.names)


def is_plain(node: cst.ImportFrom) -> bool:
    """Whether its names are on one line, separated by a comma and a space."""
    commas = [alias.comma for alias in aliases_of(node)[:-1]]
    return node.lpar is None and all(
        isinstance(comma, cst.Comma) and (_text(comma.whitespace_before), _text(comma.whitespace_after)) == ("", " ")
        for comma in commas
    )


def _text(space: cst.BaseParenthesizableWhitespace) -> str:
    return space.value if isinstance(space, cst.SimpleWhitespace) else "\n"


def of_the_other_kit(module: str, side: Side) -> bool:
    kit = THEIR_KIT if side is Side.OURS else OUR_KIT
    return module == kit or module.startswith(f"{kit}.")


def only_of_their_side(uses: tuple[Use, ...], side: Side) -> Iterator[Use]:
    """The uses of modules that have no counterpart on `side`, and so were left unchanged."""
    return (use for use in uses if of_the_other_kit(use.module, side))
