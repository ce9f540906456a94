"""The table of PyTorch's modules and ours, and the names that a source defines."""

import ast
import enum
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# --------------------------------------------------------------------------------------------------------------------
# The table of the modules of PyTorch's test kit and ours that mirror them.
#
# Running, importing and patching all read it. Names are the same on both sides, except for `MOVED`.

THEIR_KIT = "torch.testing._internal"
OUR_KIT = "torch_testing_ext"
PACKAGE = Path(__file__).resolve().parents[1]

Version = tuple[int, int]


class UserError(ValueError):
    """An error that the user can fix: shown as a message, without a traceback."""


class Side(enum.Enum):
    """The side that a file is written for."""

    OURS = "torch_testing_ext"
    THEIRS = "PyTorch"


@dataclass(frozen=True)
class MirroredModule:
    """A module of PyTorch's and our module that mirrors it. `until`: the first torch without it."""

    theirs: str
    ours: str
    until: Version | None = None


_KIT = [
    "common_utils",
    "common_distributed",
    "common_fsdp",
    "common_dist_composable",
    "common_device_type",
    "common_cuda",
    "two_tensor",
    "distributed._shard.sharded_tensor",
    "distributed.fake_pg",
    "distributed.multi_threaded_pg",
    "distributed.checkpoint_utils",
    "distributed.common_state_dict",
    "distributed.distributed_utils",
    "distributed._tensor.common_dtensor",
]
MIRRORED = (
    *(MirroredModule(f"{THEIR_KIT}.{name}", f"{OUR_KIT}.{name}") for name in _KIT),
    MirroredModule("torch.distributed._spmd", f"{OUR_KIT}.distributed._spmd", until=(2, 5)),
)

# Names that PyTorch moved or renamed: the later name, which is ours, the earlier one, and the torch that changed it.
MOVED = (
    (f"{THEIR_KIT}.common_distributed.run_subtests", f"{THEIR_KIT}.common_fsdp.run_subtests", "2.4"),
    (
        f"{THEIR_KIT}.common_distributed.MultiProcContinuousTest",
        f"{THEIR_KIT}.common_distributed.MultiProcContinousTest",
        "2.9",
    ),
)

# Modules outside their kit that define bases of test classes.
OTHER_TEST_BASES = ("torch._dynamo.test_case", "torch._inductor.test_case")

# The bases that start ranks, and the modules in which PyTorch defines them.
LAUNCHING_BASES = {
    "MultiProcessTestCase": f"{THEIR_KIT}.common_distributed",
    "DistributedTestBase": f"{THEIR_KIT}.common_distributed",
    "MultiThreadedTestCase": f"{THEIR_KIT}.common_distributed",
    "MultiProcContinuousTest": f"{THEIR_KIT}.common_distributed",
    "FSDPTest": f"{THEIR_KIT}.common_fsdp",
    "FSDPTestMultiThread": f"{THEIR_KIT}.common_fsdp",
    "FSDPTestContinuous": f"{THEIR_KIT}.common_fsdp",
    "DTensorTestBase": f"{THEIR_KIT}.distributed._tensor.common_dtensor",
}


def module_on(side: Side, name: str) -> str | None:
    """The counterpart on `side` of a module of the other side; None if it has none."""
    if side is Side.OURS:
        return next((pair.ours for pair in MIRRORED if pair.theirs == name), None)
    return next((pair.theirs for pair in MIRRORED if pair.ours == name), None)


def split_name(dotted: str, side: Side) -> tuple[str, str] | None:
    """Split a dotted name after the module that it begins with; None if that module has no counterpart on `side`."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        if module_on(side, head) is not None:
            return head, ".".join(parts[length:])
    return None


def moved_name(theirs: str) -> str | None:
    """Return this dotted name of PyTorch's as other versions of torch have it; None if it never moved."""
    before = {now: f"before torch {since}: {earlier}" for now, earlier, since in MOVED}
    since = {earlier: f"since torch {since}: {now}" for now, earlier, since in MOVED}
    return before.get(theirs) or since.get(theirs)


def source_of(module: str, root: Path) -> Path | None:
    """The source file of a module below a directory."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def installed_torch() -> Path:
    """The directory that contains the installed torch. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError("torch is not installed for this Python")
    return Path(spec.origin).parents[1]


# --------------------------------------------------------------------------------------------------------------------
# The names that a source file defines, read without importing it: no accelerator and no torch needed.


class NameKind(enum.Enum):
    """The way in which a module comes by a name."""

    CLASS = "class"
    FUNCTION = "function"
    VALUE = "value"
    REEXPORTED = "re-exported"  # imported from another module of the test kit
    IMPORTED = "imported"  # imported from elsewhere


def parse_source(file: Path) -> ast.Module:
    return _parse(file.read_bytes(), str(file))


@functools.cache
def _parse(source: bytes, file: str) -> ast.Module:
    return ast.parse(source, file)


# -- of a module


def defined_in(file: Path) -> dict[str, NameKind]:
    """The names that a module has at its top level."""
    kinds: dict[str, NameKind] = {}
    for statement in statements(parse_source(file).body):
        kinds.update(bound_by(statement))
    return kinds


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, including those below `if`, `try`, `with` and `for`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def bound_by(node: ast.stmt) -> Iterator[tuple[str, NameKind]]:
    """The names that a statement binds."""
    match node:
        case ast.ClassDef():
            yield node.name, NameKind.CLASS
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name, NameKind.FUNCTION
        case ast.Assign():
            for target in node.targets:
                yield from _values_bound_by(target)
        case ast.AnnAssign() | ast.AugAssign():
            yield from _values_bound_by(node.target)
        case ast.ImportFrom():
            module = node.module or ""
            of_kit = module.startswith((f"{THEIR_KIT}.", f"{OUR_KIT}."))
            kind = NameKind.REEXPORTED if of_kit else NameKind.IMPORTED
            for alias in node.names:
                yield alias.asname or alias.name, kind
        case ast.Import():
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, NameKind.IMPORTED


def _values_bound_by(target: ast.expr) -> Iterator[tuple[str, NameKind]]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, NameKind.VALUE


# -- of a class


def find_class(file: Path, name: str) -> ast.ClassDef | None:
    for node in statements(parse_source(file).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def defined_by(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds."""
    names: set[str] = set()
    for statement in statements(node.body):
        names.update(name for name, _ in bound_by(statement))
    return names


def members_of(node: ast.ClassDef) -> set[str]:
    """The names that a class body binds, and those that its methods assign to `self` or `cls`."""
    assigned = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            owner = ast.unparse(part.value)
            if owner in ("self", "cls"):
                assigned.add(part.attr)
    return defined_by(node) | assigned


def find_source(module: str) -> Path:
    """The source file of a module of the installed torch."""
    file = source_of(module, installed_torch())
    if file is None:
        raise UserError(f"the installed torch has no module {module}")
    return file
