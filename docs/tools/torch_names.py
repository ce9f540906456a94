"""Finds what a file knows of torch's inside, which only `torch_testing_ext/_torch/` may know.

    python docs/tools/torch_names.py [PACKAGE]

Prints a line for each private name of torch outside of that folder, each function of torch that is replaced, each frame
whose name or variables are read, each name of a thread of torch, and each text of an error that is looked for. Exits
with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "torch_testing_ext"
# The only folder that may know torch's inside.
KNOWS_TORCH = "_torch/"

# Private names of others than torch, by owner. What a file defines itself needs no row.
OF_OTHERS: Mapping[str, frozenset[str]] = {
    "unittest": frozenset(
        (
            *("_ErrorHolder", "_class_cleanups", "_cleanups", "_moduleSetUpFailed", "_module_cleanups"),
            *("_previousTestClass", "_subDescription", "_testFunc", "_testMethodName"),
        )
    ),
    "multiprocessing": frozenset(
        ("_children", "_fd", "_finalizer_registry", "_resource_tracker", "_run_after_forkers", "_run_finalizers")
    ),
    "asyncio": frozenset(("_scheduled", "_selector", "_ssock")),
    "threading": frozenset(("_target",)),
    "named tuples": frozenset(("_replace",)),
    # Attributes that bases of tests have for the modules beside theirs.
    "this package": frozenset(
        (
            *("_collectives_may_differ", "_decides_about_skips", "_error", "_exception", "_interruptible"),
            *("_current_test_name", "_handle_test_skip", "_known_skip", "_min_gpus_required", "_overrides"),
            *("_required_world_size", "_result", "_timeout", "_with_expectations"),
        )
    ),
}
_ALLOWED = frozenset().union(*OF_OTHERS.values())
# Attributes by which objects of others are known.
_MARKS = ("_torch_testing_ext_", "_hypothesis_internal_")
# What Python says itself.
_TEXTS_OF_OTHERS = ("relative import",)
# Files that read names of frames, by whose frames these are.
FRAMES_OF_OTHERS: Mapping[str, Sequence[str]] = {
    "pytest and the standard library": ("_process/file_reads.py", "_process/fork_safety.py"),
    "asyncio and multiprocessing": ("_collectives/blocked/event_loops.py",),
    "this package": ("_testing/bases/threaded_group.py", "launch/rank_debugger.py"),
}
# Files that are about private names: those of pytest, and those of the modules in which PyTorch has bases of tests.
EXEMPT = ("_pytest_ranks/pytest_internals/", "upstream/mapping.py")
_OF_FRAMES = frozenset(("co_name", "co_filename", "co_qualname"))
# The functions that set, or replace, an attribute of their first argument.
_SETTERS, _PATCHES = ("setattr", "delattr"), ("patch.object", "patch.multiple")
_GETTERS = ("getattr", "hasattr", *_SETTERS)
_OF_INTEREST = frozenset((*_GETTERS, "object", "multiple", "patch", "attrgetter", "methodcaller"))
# Settings of torch: their values are no functions.
_SETTINGS = ("allow_tf32", "fill_uninitialized_memory", "fp32_precision")
_THREAD = re.compile(r"(pt|gloo)_\w+")
_DOTTED = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*[\w.]*")


class Finding(NamedTuple):
    """Something that a file knows of torch. `what`: the kind and the name."""

    line: int
    what: str


def findings(tree: ast.Module, known: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """What a file knows of torch's inside. `known`: private names that are torch's, whatever the file defines."""
    nodes = [*ast.walk(tree)]
    names = _Names(nodes, known)
    errors = _texts_of_errors(nodes)
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (Finding(node.lineno, f"imports {name}") for name in imported(node) if is_private(name))
            case ast.Subscript(ast.Attribute(attr="f_locals")) | ast.Call(
                ast.Attribute(ast.Attribute(attr="f_locals"), "get")
            ):
                yield Finding(node.lineno, f"reads {ast.unparse(node)}")
            case ast.Attribute() if names.is_private_of_torch(node):
                yield Finding(node.lineno, f"uses {ast.unparse(node)}")
            case ast.Constant(value=str(text)) if _DOTTED.fullmatch(text) or text in known:
                yield Finding(node.lineno, f"names {text}")
            case ast.Constant(value=str(text)) if _THREAD.fullmatch(text):
                yield Finding(node.lineno, f"names the thread {text}")
            case ast.Compare() | ast.Call() if names.reads_name_of_frame(node):
                yield Finding(node.lineno, f"reads the name of a frame: {ast.unparse(node)}")
            case ast.Compare() | ast.Call() if _reads_text(node, errors):
                yield Finding(node.lineno, f"reads the text of an error: {ast.unparse(node)}")
        if isinstance(node, ast.Call):
            yield from (Finding(node.lineno, what) for what in names.known_by_call(node))
        if isinstance(node, ast.MatchClass):
            private = [name for name in node.kwd_attrs if is_private(name) and name not in names.own | _ALLOWED]
            yield from (Finding(node.cls.lineno, f"uses {name}") for name in private)
    for target in _targets(nodes):
        if names.is_of_torch(target.value) and target.attr not in _SETTINGS:
            yield Finding(target.lineno, f"replaces {ast.unparse(target)}")


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names of torch that a statement imports."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    else:
        found = [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.partition(".")[0] == "torch"]


def is_private(dotted: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


class _Names:
    """The names of a file: those that lead to torch, those that lead elsewhere, and those that it defines."""

    def __init__(self, nodes: Sequence[ast.AST], known: frozenset[str]):
        self._of_torch: set[str] = set()
        self._of_others: set[str] = set()
        self._texts: dict[str, str] = {}
        self._with_text: set[str] = set()
        self._has_frames = any(isinstance(node, ast.Attribute) and node.attr in _OF_FRAMES for node in nodes)
        self.own: set[str] = set()
        for node in nodes:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._note_import(node)
                case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AsyncFunctionDef(name):
                    self.own.add(name)
                case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                    self.own.add(name)
        self.own -= known
        for target, value in _bindings(nodes):
            match target, value:
                case ast.Name(name), ast.Constant(value=str(text)):
                    self._texts[name] = text
                    self._with_text.add(name)
                case ast.Name(name), ast.expr() if self._leads_to_torch(value):
                    self._of_torch.add(name)
                case ast.Name(name), ast.Tuple() | ast.List() | ast.Set() if self._has_text(value):
                    self._with_text.add(name)

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        is_here = isinstance(node, ast.ImportFrom) and (node.level > 0 or node.module == "torch_testing_ext")
        for alias in node.names:
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            name = alias.asname or alias.name.partition(".")[0]
            top = module.partition(".")[0]
            if top == "torch" and not is_here:
                self._of_torch.add(name)
            elif top != "torch_testing_ext" and not is_here:
                self._of_others.add(name)

    def _leads_to_torch(self, value: ast.expr) -> bool:
        """Whether this is a module, class or function of torch, and not what one of its functions returns."""
        match value:
            case ast.Name() | ast.Attribute():
                return self.is_of_torch(value)
            case ast.Call(ast.Name("getattr" | "vars"), [first, *_]):
                return self.is_of_torch(first)
            case ast.Tuple(parts) | ast.List(parts):
                return any(self._leads_to_torch(part) for part in parts)
            case ast.Subscript(ast.Attribute(attr="modules"), found):
                return self._text(found).partition(".")[0] == "torch"
            case ast.Call(function, [first, *_]) if _name_of(function) == "import_module":
                return self._text(first).partition(".")[0] == "torch"
        return False

    def _text(self, node: ast.expr) -> str:
        """The text that an expression has, or begins with, if the file says it."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(name):
                return self._texts.get(name, "")
            case ast.JoinedStr([first, *_]) | ast.BinOp(first) | ast.FormattedValue(first):
                return self._text(first)
        return ""

    def known_by_call(self, call: ast.Call) -> Iterator[str]:
        """What a call says of torch: a private name for an attribute or an argument, or that something is replaced."""
        function = _name_of(call.func)
        if not (function in _OF_INTEREST or self.is_of_torch(call.func)):
            return
        texts = [self._text(argument) for argument in call.args]
        if function in ("attrgetter", "methodcaller"):
            yield from (f"uses {text}" for text in texts if is_private(text))
        if len(call.args) > 1 and _gets(call) and is_private(texts[1]):
            is_whole = isinstance(call.args[1], (ast.Constant, ast.Name))
            is_own = texts[1] in self.own | _ALLOWED or texts[1].startswith(_MARKS)
            if self.is_of_torch(call.args[0]) or (is_whole and not is_own):
                yield f"uses {texts[1]} of {ast.unparse(call.args[0])}"
        if self.is_of_torch(call.func):
            private = [word.arg for word in call.keywords if word.arg and is_private(word.arg)]
            yield from (f"passes {name} to {ast.unparse(call.func)}" for name in private)
        if call.args and _sets(call) and self.is_of_torch(call.args[0]):
            yield f"replaces a part of {ast.unparse(call.args[0])}"
        if texts and function == "patch" and texts[0].startswith("torch."):
            yield f"replaces {texts[0]}"

    def _has_text(self, node: ast.AST) -> bool:
        """Whether a part of this is a text, or a name that the file binds to one, or to several."""
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                return True
            if isinstance(each, ast.Name) and each.id in self._with_text:
                return True
        return False

    def reads_name_of_frame(self, node: ast.Compare | ast.Call) -> bool:
        """Whether this compares the function or file of a frame with a text."""
        if not self._has_frames:
            return False
        if isinstance(node, ast.Call):
            is_test = isinstance(node.func, ast.Attribute) and node.func.attr in ("endswith", "startswith", "fullmatch")
            parts = [node.func, *node.args] if is_test else []
        else:
            parts = [node.left, *node.comparators]
        names = {each.attr for part in parts for each in ast.walk(part) if isinstance(each, ast.Attribute)}
        return not _OF_FRAMES.isdisjoint(names) and any(map(self._has_text, parts))

    def is_of_torch(self, node: ast.expr) -> bool:
        """Whether an expression begins at a name of torch: `dist.Store`, `getattr(torch, name).cuda`."""
        return _root(node) in self._of_torch

    def is_private_of_torch(self, node: ast.Attribute) -> bool:
        """Whether this takes a private name that may be torch's: neither the file's own nor that of another package."""
        if not is_private(node.attr) or _root(node) in self._of_others:
            return False
        if self.is_of_torch(node):
            return True
        is_own_object = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_of_base = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        return not (is_own_object or is_of_base or node.attr in self.own or node.attr in _ALLOWED)


def _root(node: ast.AST) -> str:
    """The name at which an expression begins."""
    while True:
        match node:
            case ast.Call(ast.Name("getattr" | "vars"), [first, *_]):
                node = first
            case ast.Attribute(value) | ast.Subscript(value):
                node = value
            case ast.Call(func):
                node = func
            case ast.Name(name):
                return name
            case _:
                return ""


def _name_of(function: ast.expr) -> str:
    """The last part of a function's name."""
    match function:
        case ast.Attribute(attr=name) | ast.Name(name):
            return name
    return ""


def _gets(call: ast.Call) -> bool:
    return _name_of(call.func) in _GETTERS


def _sets(call: ast.Call) -> bool:
    return _name_of(call.func) in _SETTERS or ast.unparse(call.func).endswith(_PATCHES)


def _targets(nodes: Sequence[ast.AST]) -> Iterator[ast.Attribute]:
    """The attributes that are assigned or deleted."""
    for node in nodes:
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        yield from (target for target in targets if isinstance(target, ast.Attribute))


def _bindings(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names, each with what it is bound to: by assignments, loops over what is listed, `with` and `:=`."""
    for node in nodes:
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                yield from zip(targets, values, strict=True)
            case ast.Assign(targets, value):
                yield from ((target, value) for target in targets)
            case ast.AnnAssign(target, value=ast.expr() as value) | ast.NamedExpr(target, value):
                yield target, value
            case ast.For(target, values) | ast.comprehension(target, values):
                yield target, values
            case ast.withitem(value, ast.expr() as target):
                yield target, value


_TEXT_METHODS = ("startswith", "endswith", "find", "index", "search", "match", "fullmatch", "findall")


def _texts_of_errors(nodes: Sequence[ast.AST]) -> set[str]:
    """Expressions that are the text of an error which the file catches or is given: `str(error)`, and names of it."""
    errors = set()
    for node in nodes:
        match node:
            case ast.ExceptHandler(name=str(name)):
                errors.add(name)
            case ast.arg(name, ast.expr() as kind) if re.search(r"\b(Base)?Exception\b", ast.unparse(kind)):
                errors.add(name)
    texts = {text for name in errors for text in (f"str({name})", f"repr({name})", f"{name}.args[0]")}
    if not texts:
        return texts
    given = [(target.id, value) for target, value in _bindings(nodes) if isinstance(target, ast.Name)]
    return texts | {name for name, value in given if ast.unparse(value) in texts}


def _reads_text(node: ast.Compare | ast.Call, texts: set[str]) -> bool:
    """Whether this looks for something in the text of an error."""
    if not texts:
        return False
    match node:
        case ast.Compare(left, _, comparators):
            parts = (left, *comparators)
            words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            has_words = any(word not in _TEXTS_OF_OTHERS for word in words)
            return has_words and any(ast.unparse(part) in texts for part in parts)
        case ast.Call(ast.Attribute(owner, method), arguments) if method in _TEXT_METHODS:
            return any(ast.unparse(part) in texts for part in (owner, *arguments))
    return False


def private_names_of_torch(trees: Sequence[ast.Module]) -> frozenset[str]:
    """The private names that the folder uses of what is not its own."""
    found = set()
    for tree in trees:
        nodes = [*ast.walk(tree)]
        names = _Names(nodes, frozenset())
        for node in nodes:
            if isinstance(node, ast.Attribute) and names.is_private_of_torch(node):
                found.add(node.attr)
    return frozenset(name for name in found - _ALLOWED if is_private(name))


def outside(sources: Mapping[str, ast.Module]) -> Iterator[str]:
    """A line for each thing that files outside of the folder know; `sources` are trees by path in the package."""
    known = private_names_of_torch([tree for name, tree in sources.items() if name.startswith(KNOWS_TORCH)])
    of_others = [file for files in FRAMES_OF_OTHERS.values() for file in files]
    for name, tree in sources.items():
        if name.startswith((KNOWS_TORCH, *EXEMPT)):
            continue
        for line, what in findings(tree, known):
            if not (what.startswith("reads the name of a frame") and name in of_others):
                yield f"{name}:{line} {what}"


def main(words: Sequence[str]) -> int:
    """Print what the package knows outside of the folder."""
    package = Path(words[0]) if words else PACKAGE
    files = sorted(package.rglob("*.py"))
    trees = {file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    lines = [*outside(trees)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
