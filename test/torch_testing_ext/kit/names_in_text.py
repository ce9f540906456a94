"""Finds names of the package's modules in strings, comments and other text, and says which of them do not exist.

An import of a module that has moved fails. A name in a string often does not: `sys.modules.get` answers None, and a
path that nothing matches is never excluded. Checked are dotted names (`torch_testing_ext.launch.in_rank`), of which the
first word after the module must be a name in it, paths (`torch_testing_ext/launch/in_rank.py`), what `python -m` runs,
what `from ... import` takes in code inside a string, and the modules of `interpreter.command` and
`Path(__file__).with_name`.
"""

import ast
import functools
import io
import itertools
import re
import symtable
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "torch_testing_ext"
# Stands for an expression in an f-string.
GAP = "\0"
_DOTTED = re.compile(rf"(?<![\w./@-]){PACKAGE}(?P<rest>(?:\.\w+)+)(?P<open>\.?{GAP}|\.(?=[\"'{{]|$))?")
_PATH = re.compile(
    rf"(?P<test>test/)?(?<![\w.-]){PACKAGE}/(?P<rest>(?:\w+/)*(?:\w+(?:\.py\b)?)?)(?P<open>[{GAP}*{{<.-]?)"
)
_RUN = re.compile(rf"-m (?P<name>{PACKAGE}(?:\.\w+)*)")
_TAKEN = re.compile(rf"from (?P<name>{PACKAGE}(?:\.\w+)*) import (?P<names>\w+(?:, *\w+)*)\b(?! as)")


class KnownModules:
    """The modules of a package, by dotted name, and the names that they define."""

    def __init__(self, modules: Mapping[str, Path], tests: Path) -> None:
        self.modules = modules
        self.folder = modules[PACKAGE].parent
        self.tests = tests

    @functools.cache  # noqa: B019  # as long as the tests run
    def names_in(self, module: str) -> frozenset[str]:
        """The names at a module's top level; where it has `__getattr__`, also the words of its strings."""
        text = self.modules[module].read_text()
        symbols = symtable.symtable(text, module, "exec").get_symbols()
        names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
        tree = ast.parse(text)
        if "__getattr__" in names:
            constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            names |= {value for value in constants if isinstance(value, str)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["*"]:
                source = self._absolute(module, node)
                names |= self.names_in(source) if source in self.modules else set()
        return frozenset({*names, "__file__", "__path__", "__name__", "__doc__"})

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        is_package = self.modules[module].name == "__init__.py"
        parts = module.split(".") if is_package else module.split(".")[:-1]
        above = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    def fault_of_name(self, name: str) -> str | None:
        """Says why a dotted name is neither a module nor the name of something in one."""
        parts = name.split(".")
        length = next(length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in self.modules)
        module = ".".join(parts[:length])
        if length == len(parts) or parts[length] in self.names_in(module):
            return None
        return f"{name}: {module} has no {parts[length]}"

    def fault_of_start(self, start: str) -> str | None:
        """Says that no module's name begins with `start`, which an f-string completes."""
        return None if any(name.startswith(start) for name in self.modules) else f"{start}...: no module begins so"

    def fault_of_path(self, path: str, in_tests: bool) -> str | None:
        """Says that there is no such file or folder; `path` is relative to the package or the folder of its tests."""
        place = (self.tests if in_tests else self.folder) / path
        if place.exists() or (not place.suffix and place.with_suffix(".py").exists()):
            return None
        return f"{'test/' if in_tests else ''}{PACKAGE}/{path}: no such file"

    def fault_of_run(self, name: str) -> str | None:
        """Says why `python -m NAME` does not run a module."""
        if name not in self.modules:
            return f"-m {name}: no such module"
        if self.modules[name].name == "__init__.py" and f"{name}.__main__" not in self.modules:
            return f"-m {name}: a package without __main__.py"
        return None

    def fault_of_command(self, name: str) -> str | None:
        """Says why `interpreter.command` cannot call `main` of this module."""
        full = f"{PACKAGE}.{name}"
        if full not in self.modules:
            return f"interpreter.command({name!r}): no such module"
        return None if "main" in self.names_in(full) else f"interpreter.command({name!r}): no main() in {full}"


def faults_of_text(text: str, known: KnownModules) -> Iterator[tuple[int, str]]:
    """The names in a text that do not exist, each with the number of lines before it."""
    for match in _DOTTED.finditer(text):
        name = PACKAGE + match["rest"]
        if match["open"] is None:
            yield _line(text, match), known.fault_of_name(name)
        else:
            yield _line(text, match), known.fault_of_start(name + match["open"].removesuffix(GAP))
    for match in _PATH.finditer(text):
        # A placeholder or a pattern ends in the middle of a name; what is before the last slash is there.
        path = match["rest"].rpartition("/")[0] if match["open"] in (GAP, *"*{<-") else match["rest"]
        yield _line(text, match), known.fault_of_path(path, in_tests=match["test"] is not None)
    for match in _RUN.finditer(text):
        yield _line(text, match), known.fault_of_run(match["name"])
    for match in _TAKEN.finditer(text):
        for name in re.split(", *", match["names"]):
            yield _line(text, match), known.fault_of_name(f"{match['name']}.{name}")


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start())


def strings_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each string with its line; f-strings as one text, in which `GAP` stands for an expression."""
    in_f_strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            in_f_strings.update(id(part) for part in node.values)
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_f_strings:
            yield node.lineno, node.value


def _comments_in(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _runs_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The string after each string "-m" of a list, a tuple or a call: `[python, "-m", "torch_testing_ext.moving"]`."""
    for node in ast.walk(tree):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        for option, word in itertools.pairwise(words):
            if _string(option) == "-m" and _string(word).startswith(f"{PACKAGE}."):
                yield word.lineno, _string(word)


def _joined_paths_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The paths that calls join from words: `os.path.join("torch_testing_ext", "launch", name)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.path.join", "Path"):
            words = [*itertools.takewhile(bool, itertools.dropwhile(PACKAGE.__ne__, map(_string, node.args)))]
            if len(words) > 1:
                yield node.lineno, "/".join(words)


def _string(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def faults_of_source(source: str, known: KnownModules, place: Path | None = None) -> Iterator[tuple[int, str]]:
    """The names in strings and comments of a source that do not exist, with their lines.

    `place` is the file of a module of the package. There, a string that is a name as a whole names a module: it is
    imported, run, or looked for in `sys.modules`.
    """
    tree = ast.parse(source)
    found: list[tuple[int, str | None]] = []
    for line, text in [*strings_in(tree), *_joined_paths_in(tree), *_comments_in(source)]:
        if place is not None and re.fullmatch(rf"{PACKAGE}(\.\w+)+", text) and text not in known.modules:
            found.append((line, f"{text}: no such module"))
        else:
            found += [(line + below, fault) for below, fault in faults_of_text(text, known)]
    found += [(line, known.fault_of_run(name)) for line, name in _runs_in(tree)]
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("interpreter"), "command"), [ast.Constant(str(name)), *_]):
                found.append((node.lineno, known.fault_of_command(name)))
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name("Path"), [ast.Name("__file__")]), "with_name"),
                [ast.Constant(str(name))],
            ) if place is not None and not place.with_name(name).exists():
                found.append((node.lineno, f"Path(__file__).with_name({name!r}): no such file"))
    yield from ((line, fault) for line, fault in found if fault is not None)
