"""Finds the fixed ports that a test file uses, by its source, and failures because of a port in use.

Tests that use the same port disturb each other if they run at once: one fails, or its ranks meet those of the other.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..model import Attempt, Test, Unit

# Whether it is worth parsing a source: most have no port.
_HINT = re.compile(r"(?<![a-z])_?ports?\b|port[_\"']|_port|tcp://|tcpstore|:\d{4,5}|\.bind\(", re.IGNORECASE)
# MASTER_PORT, port, masterPort; but not support, import or report.
_PORT_NAME = re.compile(r"(?i:(^|_)ports?(_|$|\d))|(?<=[a-z])Port$")
_HOST = r"(?:tcp://[^/:\s]*|localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])"
_ADDRESS = re.compile(_HOST + r":(\d{1,5})(?!\d)")
_OPEN_ADDRESS = re.compile(_HOST + r":$")
_SETTERS = {"setdefault", "setenv", "putenv", "get", "getenv"}
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT_IN_TEXT = re.compile(r"\bport[:=]? ?(\d{2,5})\b|" + _HOST + r":(\d{2,5})\b|\('[^']*', (\d{2,5})\)", re.IGNORECASE)


def fixed_ports(source: str) -> frozenset[int]:
    """The ports that this source names; none if it cannot be parsed."""
    if not _HINT.search(source):
        return frozenset()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(port for port in _Ports(tree).found() if 0 < port < 1 << 16)


def with_ports(tests: Iterable[Test], root: Path) -> Iterator[Test]:
    """The tests, with the ports that their files name."""
    ports: dict[str, tuple[int, ...]] = {}
    for test in tests:
        file = test.id.file
        if file not in ports:
            ports[file] = _ports_of_file(root / file)
        yield dataclasses.replace(test, ports=ports[file]) if ports[file] else test


def _ports_of_file(path: Path) -> tuple[int, ...]:
    try:
        return tuple(sorted(fixed_ports(path.read_text(encoding="utf-8", errors="replace"))))
    except OSError:
        return ()


def notes_on_ports(units: Iterable[Unit]) -> Iterator[str]:
    """Say which units run one after the other because of a port."""
    users: dict[int, list[Unit]] = {}
    for unit in units:
        for port in unit.ports:
            users.setdefault(port, []).append(unit)
    by_files: dict[tuple[str, ...], list[int]] = {}
    for port, found in users.items():
        if len(found) > 1:
            by_files.setdefault(tuple(sorted({unit.file for unit in found})), []).append(port)
    for files, ports in sorted(by_files.items()):
        names = ", ".join(map(str, sorted(ports)))
        what = f"the fixed port {names}" if len(ports) == 1 else f"the fixed ports {names}"
        yield f"{', '.join(files)}: the tests run one after the other, because the source names {what}"


def is_collision(attempt: Attempt) -> bool:
    """Did this attempt fail because a port was in use?"""
    return any(_IN_USE.search(text) for text in _texts(attempt))


def ports_in_use(attempt: Attempt) -> frozenset[int]:
    """The ports that were in use, as far as the failure names them."""
    lines = (line for text in _texts(attempt) for line in text.splitlines() if _IN_USE.search(line))
    return frozenset(int(next(filter(None, found))) for line in lines for found in _PORT_IN_TEXT.findall(line))


def _texts(attempt: Attempt) -> Sequence[str]:
    return (attempt.message, attempt.output, *(log.output for log in attempt.ranks))


class _Ports:
    """The places of a source that name a port."""

    def __init__(self, tree: ast.Module):
        self._nodes = list(ast.walk(tree))
        self._docstrings = {id(node.value) for node in self._nodes if isinstance(node, ast.Expr)}
        self._values: dict[str, list[ast.expr]] = {}
        for node in self._nodes:
            for target, value in _assigned(node):
                self._values.setdefault(_name_of(target), []).append(value)

    def found(self) -> Iterator[int]:
        for node in self._nodes:
            for value in self._values_at(node):
                yield from self._numbers(value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in self._docstrings:
                yield from map(int, _ADDRESS.findall(node.value))
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
                yield from map(int, _ADDRESS.findall("".join(parts)))

    def _values_at(self, node: ast.AST) -> Iterator[ast.expr]:
        """The expressions whose values are ports."""
        for target, value in _assigned(node):
            if _PORT_NAME.search(_name_of(target)):
                yield value
        match node:
            case ast.Call():
                yield from _in_call(node)
            case ast.Dict():
                yield from (v for k, v in zip(node.keys, node.values, strict=True) if k and _is_port_name(k))
            case ast.arguments():
                positional = [*node.posonlyargs, *node.args]
                given = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
                by_name = zip(node.kwonlyargs, node.kw_defaults, strict=True)
                yield from (value for name, value in (*given, *by_name) if value and _PORT_NAME.search(name.arg))
            case ast.JoinedStr():
                for before, value in zip(node.values, node.values[1:], strict=False):
                    if _ends_in_address(before) and isinstance(value, ast.FormattedValue):
                        yield value.value
            case ast.BinOp(left=left, op=ast.Add(), right=right) if _ends_in_address(left):
                yield right

    def _numbers(self, node: ast.expr, depth: int = 0) -> Iterator[int]:
        """The numbers that an expression may have, as far as the source says."""
        if depth > 8:
            return
        match node:
            case ast.Constant(value=bool()):
                return
            case ast.Constant(value=int(number)):
                yield number
            case ast.Constant(value=str(text)) if text.isdecimal() and len(text) <= 5:
                yield int(text)
            case ast.Name() | ast.Attribute():
                for value in self._values.get(_name_of(node), ()):
                    yield from self._numbers(value, depth + 1)
            case ast.Call(func=ast.Name(id="str" | "int"), args=[first, *_]):
                yield from self._numbers(first, depth + 1)
            case ast.BinOp():
                # A base to which the rank is added. A small number beside a port that is not fixed is none.
                for part in (node.left, node.right):
                    yield from (number for number in self._numbers(part, depth + 1) if number >= 1024)
            case ast.JoinedStr(values=[ast.FormattedValue(value=only)]):
                yield from self._numbers(only, depth + 1)
            case ast.Tuple() | ast.List():
                for one in node.elts:
                    yield from self._numbers(one, depth + 1)
            case ast.Call():
                for value in _in_call(node):
                    yield from self._numbers(value, depth + 1)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            yield node.target, value


def _name_of(target: ast.expr) -> str:
    """The last part of a name, or the key of an item."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return ""


def _is_port_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_PORT_NAME.search(node.value))


def _in_call(call: ast.Call) -> Iterator[ast.expr]:
    name = _name_of(call.func)
    yield from (keyword.value for keyword in call.keywords if keyword.arg and _PORT_NAME.search(keyword.arg))
    if name in _SETTERS and len(call.args) > 1 and _is_port_name(call.args[0]):
        yield call.args[1]
    if name == "TCPStore" and len(call.args) > 1:
        yield call.args[1]
    if name in ("bind", "connect") and call.args and isinstance(call.args[0], ast.Tuple) and len(call.args[0].elts) > 1:
        yield call.args[0].elts[1]


def _ends_in_address(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_OPEN_ADDRESS.search(node.value))
