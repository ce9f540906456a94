"""Make patches for files of PyTorch's `test/` from the edits next to this file, for a checkout as it is now.

    python patches/test-suite/render.py --pytorch CHECKOUT [NAME...] [-o DIR]

An edit holds the message of its patch and describes the change, but no lines of PyTorch's file: those come from the
checkout. An edit that does not fit a checkout is an error, never a part of a patch.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import outgoing

from torch_testing_ext.upstream.mapping import UserError

HERE = Path(__file__).parent
NAME = re.compile(r"\d{4}-[a-z0-9-]+\.py")
SEPARATOR = b"\n---\n"


class Source:
    """The text of a Python file, changed by regular expressions within its classes and functions."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self._name = name

    def sub(self, within: str, pattern: str, new: str | Callable[[re.Match[str]], str], times: int = 1) -> None:
        """Replace what the pattern matches within a definition such as "Class.method", or anywhere if it is ""."""
        before, body, after = self._split(within)
        body, found = re.subn(pattern, new, body, flags=re.MULTILINE)
        if found != times:
            place = within or "the file"
            raise UserError(f"{self._name}: {pattern!r} must match {times} times in {place}, but matches {found} times")
        self.text = before + body + after

    def has(self, within: str, pattern: str) -> bool:
        return re.search(pattern, self._split(within)[1], flags=re.MULTILINE) is not None

    def _split(self, within: str) -> tuple[str, str, str]:
        if not within:
            return "", self.text, ""
        node: ast.AST = ast.parse(self.text)
        for name in within.split("."):
            found = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name]
            if len(found) != 1:
                raise UserError(f"{self._name}: there are {len(found)} definitions of {within}")
            [node] = found
        assert isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.end_lineno is not None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = self.text.splitlines(keepends=True)
        parts = lines[: first - 1], lines[first - 1 : node.end_lineno], lines[node.end_lineno :]
        before, body, after = ("".join(part) for part in parts)
        return before, body, after


class Edit(NamedTuple):
    """One edit: the message of its patch, the file of PyTorch's that it changes, and the change."""

    path: Path
    message: str
    file: Path
    change: Callable[[Source], None]

    @classmethod
    def load(cls, path: Path) -> Edit:
        spec = importlib.util.spec_from_file_location(f"edit_{path.stem.replace('-', '_')}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cls(path, module.__doc__.strip(), Path(module.FILE), module.edit)

    @property
    def subject(self) -> str:
        return self.message.partition("\n")[0]

    def patch(self, checkout: Path) -> bytes:
        """The patch for a checkout, which git has checked against it."""
        file = checkout / self.file
        if not file.is_file():
            raise UserError(f"{file} does not exist")
        old = file.read_text(encoding="utf-8")
        source = Source(old, str(self.file))
        self.change(source)
        ast.parse(source.text)
        new = outgoing.formatted(source.text.encode(), old.encode())
        patch = outgoing.make_patch({self.file: new}, checkout, self.subject)
        if not patch:
            raise UserError(f"{self.path.name} changes nothing in {checkout}")
        head, _, rest = patch.partition(SEPARATOR)
        body = self.message.partition("\n")[2].strip().encode()
        return head + b"\n" + body + SEPARATOR + rest


def load(directory: Path = HERE) -> tuple[Edit, ...]:
    return tuple(Edit.load(path) for path in sorted(directory.glob("*.py")) if NAME.fullmatch(path.name))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a checkout of PyTorch")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the patches to DIR (default: stdout)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="make only patches whose file name contains NAME")
    options = parser.parse_args(words)
    wanted = [edit for edit in load() if not options.names or any(name in edit.path.name for name in options.names)]
    if not wanted:
        print("no edit has such a name", file=sys.stderr)
        return 2
    code = 0
    for edit in wanted:
        try:
            patch = edit.patch(options.pytorch)
        except UserError as error:
            print(f"{edit.path.name}: {error}", file=sys.stderr)
            code = 2
            continue
        if options.output is None:
            sys.stdout.buffer.write(patch)
        else:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"{edit.path.stem}.patch").write_bytes(patch)
    return code


if __name__ == "__main__":
    sys.exit(main())
