"""Change lines of the package, one at a time, and see which tests notice.

    python benchmarks/mutants.py --seed 1 build/mutants.tsv                 100 lines; goes on where it was stopped
    python benchmarks/mutants.py --seed 1 --list                            only the changes
    python benchmarks/mutants.py --summary build/mutants.tsv                what the rows add up to

The lines are chosen at random: some of each room of the package, the others from all. Each is changed once: a condition
is negated, a comparison or a sign is another one, `and` is `or`, a constant is another one, a statement is dropped, or
None is returned. Comments, docstrings, imports and annotations are not changed.

Each change is made in a copy of the tree. The tests that belong to the module run there, first those that are not slow,
and if none of them fails, the slow ones. They are, in this order, and up to a number of files: the files that are named
after the module, those that import it, the others of its folder, and those of the modules that import it. A test that
also fails without the change does not count.

A changed program may end the wrong processes or remove the wrong files. So tests run in a namespace of processes of
their own, where only the copy and its temporary folder can be written: this needs Linux and `unshare`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torch_testing_ext"
OUR_TESTS = f"test/{PACKAGE}"
# Expressions for pytest's -m.
NOT_SLOW, SLOW = "not slow", "slow"
# Lines that each room has at least.
LINES_PER_ROOM = 3
# Seconds for one test; a change may make it hang.
TEST_TIMEOUT = 100
OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OTHER_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


# -- changes


class Change(NamedTuple):
    """A part of one line of a file, and what takes its place."""

    file: str
    line: int
    # In bytes, as in the syntax tree.
    begin: int
    end: int
    kind: str
    new: str

    def apply(self, source: bytes) -> bytes:
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.begin] + self.new.encode() + line[self.end :]
        return b"".join(lines)

    def lines(self, source: bytes) -> tuple[str, str]:
        """The line before and after the change."""
        before, after = (text.splitlines()[self.line - 1].decode().strip() for text in (source, self.apply(source)))
        return before, after


class _Changes(ast.NodeVisitor):
    """All changes of a file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.changes: list[Change] = []

    def _add(self, node: ast.expr | ast.stmt, kind: str, new: ast.expr | str) -> None:
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            return
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        self.changes.append(Change(self._file, node.lineno, node.col_offset, node.end_col_offset, kind, text))

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Global() | ast.Nonlocal():
                return
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test) or "__name__" in ast.unparse(test):
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
                return
            case ast.AnnAssign(value=value):
                if value is not None:
                    self.visit(value)
                return
            case ast.arg():
                return
            case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "ParamSpec" | "NewType")):
                return
        self._add_changes(node)
        returns = node.returns if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
        for child in ast.iter_child_nodes(node):
            if child is not returns:
                self.visit(child)

    def _add_changes(self, node: ast.AST) -> None:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                self._add(test, "condition", ast.UnaryOp(ast.Not(), test))
            case ast.comprehension(ifs=tests):
                for test in tests:
                    self._add(test, "condition", ast.UnaryOp(ast.Not(), test))
            case ast.Compare(left=left, ops=[operator], comparators=comparators):
                for other in OTHER_COMPARISONS[type(operator)]:
                    self._add(node, "comparison", ast.Compare(left, [other()], comparators))
            case ast.BoolOp(op=ast.And(), values=values):
                self._add(node, "and, or", ast.BoolOp(ast.Or(), values))
            case ast.BoolOp(op=ast.Or(), values=values):
                self._add(node, "and, or", ast.BoolOp(ast.And(), values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._add(node, "condition", operand)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OTHER_OPERATORS:
                self._add(node, "operator", ast.BinOp(left, OTHER_OPERATORS[type(operator)](), right))
            case ast.Constant(value=bool(value)):
                self._add(node, "constant", repr(not value))
            case ast.Constant(value=int(value) | float(value)):
                self._add(node, "constant", repr(value + 1))
            case ast.Constant(value=str(value)) if value:
                self._add(node, "constant", repr(f"changed {value}"))
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                self._add(node, "return", "return None")
            case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                self._add(node, "statement", "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self._add(node, "statement", "pass")


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def changes_of(file: str, source: str) -> list[Change]:
    visitor = _Changes(file)
    visitor.visit(ast.parse(source))
    return visitor.changes


def room_of(file: str) -> str:
    """The folder of the package that a file is in."""
    folders = file.split("/")[1:-1]
    return folders[0] if folders else PACKAGE


def choose(root: Path, seed: int, count: int) -> list[Change]:
    """Changes of that many lines: LINES_PER_ROOM of each room, the others of all."""
    by_room: dict[str, list[list[Change]]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        by_line: dict[int, list[Change]] = defaultdict(list)
        for change in changes_of(file, path.read_text()):
            by_line[change.line].append(change)
        by_room[room_of(file)] += by_line.values()
    chance = random.Random(seed)
    chosen: list[list[Change]] = []
    others: list[list[Change]] = []
    for _, lines in sorted(by_room.items()):
        chance.shuffle(lines)
        chosen += lines[:LINES_PER_ROOM]
        others += lines[LINES_PER_ROOM:]
    chosen += chance.sample(others, max(0, count - len(chosen)))
    # So that the first rows are a sample, too.
    chance.shuffle(chosen)
    return [chance.choice(changes) for changes in chosen[:count]]


# -- the tests of a module


def _imports(tree: ast.AST, package: str, modules: Mapping[str, str]) -> set[str]:
    """The modules of ours that a file imports, or names in a string. `package`: its own package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                above = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
                full = ".".join(filter(None, (above, module)))
                names.add(full)
                names.update(f"{full}.{alias.name}" for alias in aliases)
            case ast.Constant(value=str(text)) if text.startswith(PACKAGE):
                words = text.split(".")
                names.update(".".join(words[:number]) for number in range(1, len(words) + 1))
    return names & modules.keys()


class TestMap:
    """Which test files belong to which module."""

    def __init__(self, root: Path) -> None:
        self._modules: dict[str, str] = {}
        for path in sorted((root / PACKAGE).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            self._modules[file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = file
        self._names = {file: module for module, file in self._modules.items()}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for module, file in self._modules.items():
            package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
            for name in _imports(ast.parse((root / file).read_text()), package, self._modules):
                self._importers[name].add(module)
        self._testers: dict[str, set[str]] = defaultdict(set)
        self._files: list[str] = []
        for path in sorted((root / "test").rglob("test_*.py")):
            file = path.relative_to(root).as_posix()
            try:
                tree = ast.parse(path.read_text())
            except (SyntaxError, UnicodeDecodeError):
                continue
            self._files.append(file)
            for name in _imports(tree, "", self._modules):
                self._testers[name].add(file)

    def _named_after(self, module: str) -> set[str]:
        name = f"test_{module.rpartition('.')[2].lstrip('_')}"
        return {test for test in self._in_folder(self._modules[module], deep=True) if name == Path(test).stem}

    def _in_folder(self, file: str, deep: bool = False) -> set[str]:
        """The test files in the folder that mirrors the file's, or in the nearest one above it that has any."""
        folder = OUR_TESTS + file.removeprefix(PACKAGE).rpartition("/")[0]
        while True:
            below = {test for test in self._files if test.startswith(f"{folder}/")}
            direct = {test for test in below if test.rpartition("/")[0] == folder}
            if direct or folder == OUR_TESTS:
                return below if deep else direct
            folder = folder.rpartition("/")[0]

    def files(self, file: str, most: int) -> list[str]:
        """The test files that belong to a file of the package, nearest first, up to a number."""
        module = self._names[file]
        importers = sorted(self._importers[module])
        rings = [
            self._named_after(module),
            self._testers[module],
            self._in_folder(file),
            set().union(*(self._named_after(importer) for importer in importers)),
            set().union(*(self._testers[importer] for importer in importers)),
        ]
        chosen: list[str] = []
        for ring in rings:
            chosen += sorted(ring - set(chosen))
        return chosen[:most]


# -- running tests


class Verdict(NamedTuple):
    """`noticed`: by which test; empty if by none. `complete`: all tests ran, or one of them noticed."""

    noticed: str
    complete: bool
    files: int
    seconds: float

    @property
    def text(self) -> str:
        return "noticed" if self.noticed else "not noticed" if self.complete else "not finished"


class Copy:
    """A copy of the tree with an environment in which it is installed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._kept = folder / "kept"
        self._kept.mkdir()
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout.split(b"\0")
        for name in filter(None, names):
            source = ROOT / os.fsdecode(name)
            if source.is_symlink() or source.is_file():
                target = self.root / os.fsdecode(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target, follow_symlinks=False)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        # Other packages are those of this environment, but not its editable copy of ours.
        base = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "copy.pth").write_text("\n".join([str(self.root), *base]) + "\n")
        self._python = folder / "env" / "bin" / "python"
        self._folder = folder
        self._stamp = int(time.time()) - 10**6
        self._fails_unchanged: dict[str, bool] = {}

    def write(self, file: str, source: bytes) -> None:
        """Write a file with a time of its own: within one second, Python would take its old bytecode."""
        path = self.root / file
        path.write_bytes(source)
        self._stamp += 10
        os.utime(path, (self._stamp, self._stamp))

    def _pytest(
        self, chosen_tests: str, tests: Sequence[str], deselected: Iterable[str], limit: float
    ) -> tuple[int, list[str]]:
        """The exit code of pytest, negative if its time was over, and the tests that failed."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        xml = self._temporary / "junit.xml"
        command = [str(self._python), "-m", "pytest", "-q", "-x", "-m", chosen_tests, f"--timeout={TEST_TIMEOUT}"]
        command += ["-p", "no:xdist", *(f"--deselect={test}" for test in deselected), *tests]
        isolate = 'mount --bind "$0" "$0" && mount -o remount,ro,bind / && cd "$0/tree" && exec "$@"'
        environ = {
            **os.environ,
            # Not an option: runs that tests start would write the same file.
            "CI_JUNIT": str(xml),
            "TMPDIR": str(self._temporary),
            "HOME": str(self._kept),
            "TORCHINDUCTOR_CACHE_DIR": str(self._kept / "inductor"),
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            namespaces.append("--map-root-user")
        process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", isolate, str(self._folder), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "last.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # With the first process of a namespace, all others end.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, self._failed(xml)

    def _failed(self, xml: Path) -> list[str]:
        try:
            root = ET.parse(xml).getroot()
        except (OSError, ET.ParseError):
            return []
        failed = []
        for case in root.iter("testcase"):
            if any(element.tag in ("failure", "error") for element in case):
                failed.append(self._id(case.get("classname", ""), case.get("name", "")))
        return failed

    def _id(self, classname: str, name: str) -> str:
        words = (classname or name).split(".")
        for number in range(len(words), 0, -1):
            file = "/".join(words[:number]) + ".py"
            if (self.root / file).is_file():
                return "::".join([file, *words[number:], *([name] if classname else [])])
        return name

    def run(self, change: Change, source: bytes, chosen_tests: str, files: Sequence[str], limit: float) -> Verdict:
        """Run tests on the changed file."""
        began = time.monotonic()
        while files:
            left = limit - (time.monotonic() - began)
            if left <= 0:
                return Verdict("", False, len(files), time.monotonic() - began)
            self.write(change.file, change.apply(source))
            known = [test for test, fails in self._fails_unchanged.items() if fails]
            code, failed = self._pytest(chosen_tests, files, known, left)
            self.write(change.file, source)
            if code == 0 or code == 5:
                return Verdict("", True, len(files), time.monotonic() - began)
            if code < 0:
                return Verdict("", False, len(files), time.monotonic() - began)
            unusable = [test for test in failed if "::" not in test and not self._can_be_collected(chosen_tests, files)]
            if unusable:
                files = [file for file in files if file not in unusable]
                continue
            noticed = [test for test in failed if not self._fails_anyway(chosen_tests, test)]
            if noticed or not failed:
                # pytest cannot even start, or a test ended it.
                return Verdict(noticed[0] if noticed else "pytest itself", True, len(files), time.monotonic() - began)
            # The files before have passed.
            failed_file = failed[0].partition("::")[0]
            if failed_file in files:
                files = files[files.index(failed_file) :]
        return Verdict("", True, 0, 0.0)

    def _can_be_collected(self, chosen_tests: str, files: Sequence[str]) -> bool:
        """Whether all of these files can be imported together, without any change."""
        code, _ = self._pytest(chosen_tests, ["--collect-only", *files], [], 4 * TEST_TIMEOUT)
        return code == 0

    def _fails_anyway(self, chosen_tests: str, test: str) -> bool:
        """Whether a test fails without any change."""
        if test not in self._fails_unchanged:
            code, _ = self._pytest(chosen_tests, [test], [], 2 * TEST_TIMEOUT)
            self._fails_unchanged[test] = code != 0
            if self._fails_unchanged[test]:
                print(f"also fails without a change, and does not count: {test}", file=sys.stderr, flush=True)
        return self._fails_unchanged[test]


# -- rows

COLUMNS = ("number", "room", "line", "kind", "before", "after", "not slow", "by", "seconds", "slow", "by", "seconds")


def row_of(number: int, change: Change, source: bytes, not_slow: Verdict, slow: Verdict | None) -> str:
    cells = [str(number), room_of(change.file), f"{change.file}:{change.line}", change.kind, *change.lines(source)]
    for verdict in (not_slow, slow):
        noticed = verdict.noticed.removeprefix("test/") if verdict else ""
        cells += [verdict.text, noticed, f"{verdict.seconds:.0f}"] if verdict else ["", "", ""]
    return "\t".join(cell.replace("\t", " ").replace("\n", "\\n") for cell in cells)


def summary(rows: Sequence[str]) -> Iterator[str]:
    table = [row.split("\t") for row in rows]
    not_slow = sum(row[6] == "noticed" for row in table)
    slow = sum(row[9] == "noticed" for row in table)
    neither = len(table) - not_slow - slow
    unfinished = sum("not finished" in (row[6], row[9]) and "noticed" not in (row[6], row[9]) for row in table)
    yield f"{len(table)} changes: {not_slow} noticed without slow tests, {slow} more by slow ones, {neither} by neither"
    if unfinished:
        yield f"{unfinished} of these runs took too long to finish"
    if not_slow + slow:
        yield f"{not_slow / (not_slow + slow):.0%} of what any test notices is noticed without slow ones"
    for row in table:
        if row[9] == "noticed":
            yield f"only slow: {row[2]} ({row[3]}): `{row[4]}` -> `{row[5]}`, noticed by {row[10]}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Change lines of the package and see which tests notice.")
    parser.add_argument("rows", nargs="?", type=Path, help="the file with a row for each change, which is added to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--files", type=int, default=25, help="test files that run for each change, at most")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for a run of the tests of a change")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    parser.add_argument("--summary", action="store_true", help="only add up the rows")
    chosen = parser.parse_args(words)
    rows = chosen.rows.read_text().splitlines() if chosen.rows and chosen.rows.exists() else []
    if chosen.summary:
        print("\n".join(summary(rows)))
        return 0
    if chosen.list:
        for change in choose(ROOT, chosen.seed, chosen.count):
            before, after = change.lines((ROOT / change.file).read_bytes())
            print(f"{change.file}:{change.line} ({change.kind})\n  - {before}\n  + {after}")
        return 0
    if chosen.rows is None:
        parser.error("name the file of the rows")
    os.nice(5)
    # Ends the tests and removes the copy.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done = {int(row.partition("\t")[0]) for row in rows}
    chosen.rows.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, chosen.rows.open("a", buffering=1) as file:
        copy = Copy(Path(folder))
        tests = TestMap(copy.root)
        for number, change in enumerate(choose(copy.root, chosen.seed, chosen.count)):
            if number in done:
                continue
            source = (copy.root / change.file).read_bytes()
            files = tests.files(change.file, chosen.files)
            not_slow = copy.run(change, source, NOT_SLOW, files, chosen.limit)
            slow = None if not_slow.noticed else copy.run(change, source, SLOW, files, chosen.limit)
            row = row_of(number, change, source, not_slow, slow)
            file.write(f"{row}\n")
            print(row, flush=True)
            rows.append(row)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
