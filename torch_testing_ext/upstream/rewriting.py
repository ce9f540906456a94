"""Rewrites test files from one side to the other; imports libcst."""

from __future__ import annotations

import importlib
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_testing_ext._process import user_commands

from .mapping import OUR_KIT, PACKAGE, THEIR_KIT, Side, UserError, module_on, moved_name, source_of, split_name
from .other_projects import Project

# --------------------------------------------------------------------------------------------------------------------
# Rewrite a test file's imports from one side to the other.
#
# Only names of modules change; all other bytes are copied. libcst finds the names: in `from M import ...`,
# `import M [as m]`, `from PARENT import M`, in the dotted uses of a plain `import M`, and in strings passed to
# functions that take the name of a module (mock.patch, import_module).

try:
    import libcst as cst
    from libcst.codemod import CodemodContext
    from libcst.codemod.visitors import AddImportsVisitor
    from libcst.helpers import get_full_name_for_node
    from libcst.metadata import (
        ByteSpanPositionProvider,
        CodeSpan,
        MetadataWrapper,
        PositionProvider,
        QualifiedNameProvider,
    )
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
    # By alias of a module: its new name.
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


# --------------------------------------------------------------------------------------------------------------------
# Converts a file by the rules of a project. All but the statements that change keeps its bytes.

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


# --------------------------------------------------------------------------------------------------------------------
# Import test files from PyTorch: `python -m torch_testing_ext.upstream import FILE... [--to test/]`.
#
# Each file is rewritten to our imports.

TESTS = "test"


def below_tests(file: Path) -> Path:
    """A file's path below its checkout's `test/`; outside a checkout, below the innermost directory named `test`."""
    path = file.resolve()
    for root in path.parents:
        tests = root / TESTS
        if (root / ".git").exists() and path.is_relative_to(tests):
            return path.relative_to(tests)
    for folder in path.parents:
        if folder.name == TESTS:
            return path.relative_to(folder)
    return Path(path.name)


def read_file(file: Path) -> bytes:
    """The content of a file that the user named."""
    if not file.is_file():
        raise UserError(f"{file} does not exist")
    return file.read_bytes()


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
                theirs = module_on(Side.THEIRS, use.module)
                where = moved_name(f"{theirs}.{use.name}")
                hint = f" ({where})" if where else ""
                yield f"line {use.line}: {use.module} has no {use.name}{hint}"
        for use in only_of_their_side(self.rewritten.uses, Side.OURS):
            dotted = f"{use.module}.{use.name}".rstrip(".")
            yield f"line {use.line}: {dotted} stays PyTorch's, since it has no counterpart here"


def _is_here(use: Use) -> bool:
    # If it is no module of ours, only_of_their_side reports it.
    if source_of(use.module, PACKAGE.parent) is None:
        return True
    module = importlib.import_module(use.module)
    return hasattr(module, use.name)


def import_files(files: Sequence[Path], to: Path, force: bool = False) -> list[ImportedFile]:
    """Write the rewritten files below `to`: all of them, or none if one cannot be written."""
    imported = []
    for path in files:
        rewritten = rewrite_file(read_file(path), Side.OURS, path)
        imported.append(ImportedFile(path, to / below_tests(path), rewritten))
    for file in imported:
        differs = file.target.exists() and file.target.read_bytes() != file.rewritten.source
        if differs and not force:
            raise UserError(f"{file.target} already exists and differs: move it away, or use --force")
    for file in imported:
        file.target.parent.mkdir(parents=True, exist_ok=True)
        file.target.write_bytes(file.rewritten.source)
    return imported
