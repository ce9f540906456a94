"""PyTorch's rules for test classes and devices, which its linter TEST_LINTER enforces.

A class with tests says by `hw_classification = HardwareClassification.X` what it needs. GENERIC needs no device: it is
not instantiated by device, and its tests have no parameter `device`. All others are instantiated by
`instantiate_device_type_tests`, and each of their tests has that parameter: ACCELERATOR for all devices but those in
`except_for`, the others for the one in `only_for`.

The linter of the checkout has the last word: its list of files that need not follow the rules yet is read from there.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

_LINTER = Path("tools", "linter", "adapters", "test_linter.py")
_ATTRIBUTE, _ENUM, _INSTANTIATE = "hw_classification", "HardwareClassification", "instantiate_device_type_tests"
_DEVICES = ("CPU", "CUDA", "MPS", "XPU")
_KINDS = ("GENERIC", "ACCELERATOR", *_DEVICES)


def violations(path: Path, source: bytes, checkout: Path) -> tuple[str, ...]:
    """What the linter of a checkout would say of a test file with this path there. Older ones have no such linter."""
    is_judged = (checkout / _LINTER).is_file() and path.as_posix() not in exempt(checkout)
    return tuple(broken_rules(source)) if is_judged else ()


def exempt(checkout: Path) -> frozenset[str]:
    """The files of a checkout that need not follow the rules yet."""
    listed = (checkout / _LINTER).with_name("test_linter_allowlist.json")
    return frozenset(json.loads(listed.read_text(encoding="utf-8"))) if listed.is_file() else frozenset()


def broken_rules(source: bytes) -> Iterator[str]:
    """The rules that a test file breaks, each with its line."""
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (tests := _tests(node)):
            kind = _kind(node)
            if kind is None:
                yield f"line {node.lineno}: {node.name} needs {_ATTRIBUTE} = {_ENUM}.X, where X is one of {_KINDS}"
            elif kind == "GENERIC":
                yield from _of_generic(node, tests, _instantiation(module, node.name))
            else:
                yield from _of_device(node, tests, kind, _instantiation(module, node.name))


def _of_generic(node: ast.ClassDef, tests: list[ast.FunctionDef], call: ast.Call | None) -> Iterator[str]:
    if call is not None:
        yield f"line {call.lineno}: {node.name} is GENERIC: remove {_INSTANTIATE}"
    for test in tests:
        if _takes_device(test):
            yield f"line {test.lineno}: {node.name}.{test.name} is GENERIC: remove its parameter for a device"


def _of_device(node: ast.ClassDef, tests: list[ast.FunctionDef], kind: str, call: ast.Call | None) -> Iterator[str]:
    for test in tests:
        if not _takes_device(test):
            yield f"line {test.lineno}: {node.name}.{test.name} is {kind}: it needs a parameter `device`"
    if call is None:
        yield f"line {node.lineno}: {node.name} is {kind}: it needs {_INSTANTIATE}({node.name}, globals(), ...)"
        return
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    values = {name: _literal(given.get(name)) for name in ("only_for", "except_for")}
    if kind == "ACCELERATOR":
        if values["only_for"] is not None:
            yield f"line {call.lineno}: {node.name} is ACCELERATOR: name the devices to leave out, in except_for"
        for test in tests:
            for name in map(_name, test.decorator_list):
                if name.startswith("only") and name != "onlyAccelerator":
                    yield f"line {test.lineno}: {node.name}.{test.name} is ACCELERATOR: remove @{name}"
    else:
        if values["except_for"] is not None:
            yield f"line {call.lineno}: {node.name} is {kind}: remove except_for"
        if values["only_for"] not in (kind.lower(), [kind.lower()], (kind.lower(),)):
            yield f'line {call.lineno}: {node.name} is {kind}: it needs only_for="{kind.lower()}"'


def _tests(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]


def _kind(node: ast.ClassDef) -> str | None:
    """What the class declares, in one of the two forms that the linter reads."""
    for each in node.body:
        target = each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
        if isinstance(each, ast.AnnAssign) and _name(each.annotation) == _ENUM:
            target = each.target
        if isinstance(each, ast.Assign | ast.AnnAssign) and target is not None and _name(target) == _ATTRIBUTE:
            value = each.value
            if isinstance(value, ast.Attribute) and _name(value.value) == _ENUM and value.attr in _KINDS:
                return value.attr
            return None
    return None


def _instantiation(module: ast.Module, name: str) -> ast.Call | None:
    for each in module.body:
        call = each.value if isinstance(each, ast.Expr) else None
        if (
            isinstance(call, ast.Call)
            and _name(call.func) == _INSTANTIATE
            and call.args
            and _name(call.args[0]) == name
        ):
            return call
    return None


def _takes_device(test: ast.FunctionDef) -> bool:
    arguments = test.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return not names.isdisjoint({"device", "devices"})


def _name(node: ast.expr) -> str:
    """The last name of an expression: of a decorator, also if it is called."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr | None) -> object:
    """The value of a keyword; None if it is not given, and the node itself if only the program knows it."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node
