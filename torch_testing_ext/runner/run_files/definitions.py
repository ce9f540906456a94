"""The tests that source files define, by their syntax alone: also those that nothing collects, and why."""

from __future__ import annotations

import ast
import configparser
import hashlib
import itertools
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from torch_testing_ext._process.logs import text_of
from torch_testing_ext.runner.model import TestId
from torch_testing_ext.runner.options.default_folders import table, toml_content

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_OTHERS_CODE = ("build", "dist", "node_modules", "venv", "__pycache__")
_SETUPS = ("setUp", "setUpClass", "setup_method", "setup_class")
# More parameters than one wants to see by name.
_MOST_PARAMETERS = 1000


@dataclass(frozen=True)
class DefinedTest:
    """A test that a file defines."""

    id: TestId
    line: int
    # The line of its first decorator.
    first_line: int
    # A hash of its source, in which its name does not count.
    body: str
    is_parametrized: bool = False
    # What pytest appends to its name, as far as the source says: "[1]".
    parameters: tuple[str, ...] = ()
    # The lines at which it skips itself.
    skips: tuple[int, ...] = ()
    # The line of the mark that skips it, or of its class.
    skip_mark: int = 0
    # Why nothing can collect it; empty if something can.
    why_never: str = ""

    __test__ = False


@dataclass(frozen=True)
class DefinedClass:
    """A class with tests, for those that inherit them."""

    name: str
    bases: tuple[str, ...]
    line: int
    # Why pytest does not take it for one with tests, unless it is one of unittest; empty if it does.
    why_never: str = ""


@dataclass(frozen=True)
class DefinedFile:
    """The tests of one file."""

    file: str
    tests: tuple[DefinedTest, ...] = ()
    classes: tuple[DefinedClass, ...] = ()
    # The last parts of the modules that it imports.
    imports: frozenset[str] = frozenset()
    # The line at which importing it may skip it.
    import_skip: int = 0
    why_never: str = ""


@dataclass(frozen=True)
class Patterns:
    """The names that pytest's settings choose."""

    files: tuple[str, ...] = ("test_*.py", "*_test.py")
    classes: tuple[str, ...] = ("Test",)
    functions: tuple[str, ...] = ("test",)
    # Folders and files that are ignored, relative to the root.
    ignored: tuple[str, ...] = ()
    no_folders: tuple[str, ...] = ()


def patterns_of(root: Path) -> Patterns:
    """The patterns in the settings of a project, else pytest's own."""
    settings: dict[str, Any] = {}
    for name, section in (("pytest.ini", "pytest"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        with suppress(configparser.Error):
            parser.read_string(text_of(root / name))
        if parser.has_section(section):
            settings = dict(parser[section])
            break
    else:
        settings = table(toml_content(root / "pyproject.toml"), ("tool", "pytest", "ini_options"))

    def words(name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = settings.get(name)
        if isinstance(value, list):
            return tuple(str(word) for word in value)
        with suppress(ValueError):
            return tuple(shlex.split(value)) if isinstance(value, str) else default
        return default

    own = Patterns()
    flags = words("addopts", ())
    ignored = []
    for flag, value in zip(flags, (*flags[1:], ""), strict=False):
        name, _, rest = flag.partition("=")
        if name in ("--ignore", "--ignore-glob"):
            ignored.append(rest or value)
    return Patterns(
        words("python_files", own.files),
        words("python_classes", own.classes),
        words("python_functions", own.functions),
        tuple(ignored),
        words("norecursedirs", ()),
    )


def find_definitions(root: Path, places: Sequence[Path]) -> tuple[DefinedFile, ...]:
    """The tests of all files below folders of a project; those of files that nothing collects say so."""
    patterns = patterns_of(root)
    files = {}
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = path.relative_to(root).as_posix()
            inside = path.relative_to(place).parts[:-1] if place.is_dir() else ()
            if not any(part.startswith(".") or part in _OTHERS_CODE for part in inside):
                files[name] = defined_in(root, name, patterns)
    imported = frozenset().union(*(file.imports for file in files.values()))
    found = []
    for name, file in files.items():
        why = _why_ignored(root, name, patterns)
        is_named_so = any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in patterns.files)
        if not why and not is_named_so:
            if PurePosixPath(name).stem in (*imported, "conftest", "__init__"):
                # A module for tests.
                file = replace(file, tests=tuple(test for test in file.tests if test.id.cls))
            else:
                why = f"no pattern of python_files matches its name ({' '.join(patterns.files)})"
        found.append(replace(file, why_never=why))
    return tuple(found)


def _why_ignored(root: Path, name: str, patterns: Patterns) -> str:
    """Say what has pytest pass over a file; empty if nothing does."""
    path = root / name
    for folder in PurePosixPath(name).parts[:-1]:
        if any(fnmatch(folder, pattern) for pattern in patterns.no_folders):
            return f"norecursedirs leaves out its folder {folder}"
    for pattern in patterns.ignored:
        if fnmatch(name, pattern) or PurePosixPath(name).is_relative_to(pattern):
            return f"--ignore {pattern} in the settings"
    for above in path.parents:
        conftest = above / "conftest.py"
        for line, pattern in _ignored_by(conftest):
            target = above / pattern
            if fnmatch(str(path), str(target)) or path.is_relative_to(target):
                return f"{conftest.relative_to(root).as_posix()}:{line} ignores it"
        if above == root:
            break
    return ""


@lru_cache(maxsize=1000)
def _ignored_by(conftest: Path) -> tuple[tuple[int, str], ...]:
    """The paths that a conftest file has pytest ignore, with the lines."""
    found = []
    tree = _parsed(text_of(conftest)) if conftest.is_file() else None
    for node in ast.walk(tree) if tree is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if names & {"collect_ignore", "collect_ignore_glob"} and isinstance(value, (ast.List, ast.Tuple)):
            for item in value.elts:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    found.append((item.lineno, item.value))
    return tuple(found)


def defined_in(root: Path, file: str, patterns: Patterns | None = None) -> DefinedFile:
    """The tests of one file; none if it cannot be parsed."""
    patterns = patterns or Patterns()
    source = text_of(root / file)
    tree = _parsed(source)
    if tree is None:
        return DefinedFile(file)
    reader = _FileReader(file, patterns)
    reader.read(tree.body, (), "", _mark_within(tree.body))
    imports = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
    return DefinedFile(file, tuple(reader.tests), tuple(reader.classes), frozenset(imports), _import_skip(tree))


def _parsed(source: str) -> ast.Module | None:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
    return None


def _import_skip(tree: ast.Module) -> int:
    """The line at which the module skips itself, 0 without any."""
    for statement in tree.body:
        if isinstance(statement, (*_Function, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _last_name(node.func) in ("importorskip", "skip", "SkipTest", "exit"):
                return node.lineno
        if _is_skip_mark(statement):
            return statement.lineno
    return 0


class _FileReader:
    """Reads the statements of a module."""

    def __init__(self, file: str, patterns: Patterns):
        self._file = file
        self._patterns = patterns
        self.tests: list[DefinedTest] = []
        self.classes: list[DefinedClass] = []

    def read(self, body: Sequence[ast.stmt], within: tuple[str, ...], why_never: str, skip_mark: int) -> None:
        """Read the statements of the module, or of a class. `skip_mark`: the line at which all of it is skipped."""
        last = {node.name: node for node in body if isinstance(node, (*_Function, ast.ClassDef))}
        for node in _statements(body):
            if isinstance(node, _Function) and self._is_test(node, within):
                why = why_never
                later = last.get(node.name)
                if not why and node in body and later is not None and later is not node:
                    why = f"a later definition of the same name shadows it, at line {later.lineno}"
                self.tests.append(self._test(node, within, why, skip_mark))
            elif isinstance(node, ast.ClassDef):
                later = last.get(node.name)
                why = why_never
                if not why and node in body and later is not node and later is not None:
                    why = f"a later class of the same name shadows it, at line {later.lineno}"
                self._class(node, within, why, skip_mark)

    def _is_test(self, node: ast.FunctionDef | ast.AsyncFunctionDef, within: tuple[str, ...]) -> bool:
        if any(_last_name(_called(each)) in ("fixture", "property", "overload") for each in node.decorator_list):
            return False
        prefixes = self._patterns.functions
        is_test = any(node.name.startswith(each) or fnmatchcase(node.name, each) for each in prefixes)
        return is_test or (bool(within) and node.name.startswith("test"))

    def _class(self, node: ast.ClassDef, within: tuple[str, ...], why: str, skip_mark: int) -> None:
        is_named_so = any(node.name.startswith(each) or fnmatchcase(node.name, each) for each in self._patterns.classes)
        methods = {each.name: each for each in node.body if isinstance(each, _Function)}
        maker = next((methods[each] for each in ("__init__", "__new__") if each in methods), None)
        why_not = ""
        if not is_named_so:
            why_not = f"no pattern of python_classes matches {node.name}"
        elif maker is not None:
            why_not = f"it has {maker.name}, at line {maker.lineno}"
        name = "::".join((*within, node.name))
        bases = tuple(_last_name(base) for base in node.bases)
        self.classes.append(DefinedClass(name, bases, node.lineno, why_not))
        marked = _skip_mark(node.decorator_list) or _mark_within(node.body) or skip_mark
        in_setups = [line for each in _SETUPS if each in methods for line in _skip_calls(methods[each])]
        marked = marked or next(iter(in_setups), 0)
        self.read(node.body, (*within, node.name), why, marked)

    def _test(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, within: tuple[str, ...], why: str, skip_mark: int
    ) -> DefinedTest:
        test = TestId(self._file, "::".join(within), node.name)
        sets = [_called(each) for each in node.decorator_list]
        is_parametrized = any("parametrize" in _last_name(each) or _last_name(each) == "given_each" for each in sets)
        return DefinedTest(
            test,
            node.lineno,
            min([node.lineno, *(each.lineno for each in node.decorator_list)]),
            _body_of(node),
            is_parametrized,
            _parameters(node.decorator_list),
            _skip_calls(node),
            _skip_mark(node.decorator_list) or skip_mark,
            why,
        )


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, also those under conditions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _last_name(node: ast.expr) -> str:
    node = _called(node)
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _skip_mark(decorators: Sequence[ast.expr]) -> int:
    """The line of a mark that skips: those of pytest and unittest, and their conditions."""
    names = ("skip", "skipif", "skipIf", "skipUnless")
    return next((each.lineno for each in decorators if _last_name(each) in names), 0)


def _mark_within(body: Sequence[ast.stmt]) -> int:
    """The line of the mark that skips all in the body of a class or module."""
    return next((each.lineno for each in body if _is_skip_mark(each)), 0)


def _skip_calls(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, ...]:
    """The lines at which a function skips the test."""
    calls = (each for statement in node.body for each in ast.walk(statement) if isinstance(each, ast.Call))
    return tuple(call.lineno for call in calls if _last_name(call.func) in ("skip", "skipTest", "SkipTest"))


def _is_skip_mark(node: ast.stmt) -> bool:
    """Whether a statement gives all tests around it a mark that skips them."""
    is_mark = isinstance(node, ast.Assign) and _last_name(node.targets[0]) == "pytestmark"
    return is_mark and "skip" in ast.unparse(node)


def _body_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A hash of the arguments and the body."""
    text = "\n".join([ast.dump(node.args), *(ast.dump(statement) for statement in node.body)])
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _parameters(decorators: Sequence[ast.expr]) -> tuple[str, ...]:
    """The parameters of pytest's parametrize, if the source has them as literals. The lowest decorator comes first."""
    sets = []
    for each in reversed(decorators):
        if isinstance(each, ast.Call) and _last_name(each) == "parametrize":
            ids = _ids(each)
            if not ids or "mark" not in ast.unparse(each.func):
                return ()
            sets.append(ids)
    count = 1
    for ids in sets:
        count *= len(ids)
    if not sets or count > _MOST_PARAMETERS:
        return ()
    return tuple(f"[{'-'.join(words)}]" for words in itertools.product(*sets))


def _ids(call: ast.Call) -> list[str]:
    """The ids of one parametrize; empty if they cannot be known without running it."""
    if len(call.args) != 2 or call.keywords:
        return []
    names, values = call.args
    if not isinstance(names, ast.Constant) or not isinstance(names.value, str) or "," in names.value:
        return []
    if isinstance(values, ast.Call) and _last_name(values) == "range":
        with suppress(ValueError, TypeError):
            numbers = range(*(ast.literal_eval(argument) for argument in values.args))
            return [str(number) for number in numbers] if len(numbers) <= _MOST_PARAMETERS else []
        return []
    if not isinstance(values, (ast.List, ast.Tuple)):
        return []
    ids = [_id(value) for value in values.elts]
    known = [each for each in ids if each is not None]
    return known if len(known) == len(ids) and len(set(known)) == len(known) else []


def _id(value: ast.expr) -> str | None:
    if isinstance(value, ast.Call) and _last_name(value) == "param":
        named = [word.value for word in value.keywords if word.arg == "id"]
        value = named[0] if named else value.args[0] if len(value.args) == 1 else value
    if isinstance(value, ast.UnaryOp):
        with suppress(ValueError):
            number = ast.literal_eval(value)
            return str(number) if isinstance(number, (int, float)) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, (int, float, str, bool, type(None))):
        text = str(value.value)
        return text if text.isascii() and text.isprintable() and text else None
    return None
