"""The table of the modules of PyTorch's test kit and ours that mirror them.

Running, importing and patching all read it. Names are the same on both sides, except for `MOVED`.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def is_here(self) -> bool:
        return source_of(self.ours, PACKAGE.parent) is not None


@dataclass(frozen=True)
class MovedName:
    """A name that PyTorch moved or renamed in a version of torch. We follow the later version."""

    now: str
    before: str
    since: Version

    def hint(self, dotted: str) -> str:
        version = ".".join(map(str, self.since))
        if dotted == self.now:
            return f"before torch {version}: {self.before}"
        return f"since torch {version}: {self.now}"


def _kit(*names: str) -> tuple[MirroredModule, ...]:
    return tuple(MirroredModule(f"{THEIR_KIT}.{name}", f"{OUR_KIT}.{name}") for name in names)


MIRRORED = (
    *_kit(
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
    ),
    MirroredModule("torch.distributed._spmd", f"{OUR_KIT}.distributed._spmd", until=(2, 5)),
)

MOVED = (
    MovedName(
        now=f"{THEIR_KIT}.common_distributed.run_subtests",
        before=f"{THEIR_KIT}.common_fsdp.run_subtests",
        since=(2, 4),
    ),
    MovedName(
        now=f"{THEIR_KIT}.common_distributed.MultiProcContinuousTest",
        before=f"{THEIR_KIT}.common_distributed.MultiProcContinousTest",
        since=(2, 9),
    ),
)

# Names that exist only here: what a file that is sent to PyTorch uses instead. The longest matching name counts.
INSTEAD = {
    f"{OUR_KIT}.common_distributed.Need": "PyTorch's ranks check what a test needs",
    f"{OUR_KIT}.common_distributed.RankError": "use RuntimeError, which it derives from",
    f"{OUR_KIT}.common_distributed.RankFailure": "use AssertionError, which it derives from",
    f"{OUR_KIT}.common_distributed.needs_of": "PyTorch's ranks check what a test needs",
    f"{OUR_KIT}.common_distributed.requires": "use skip_if_lt_x_gpu or another of PyTorch's decorators",
    f"{OUR_KIT}.common_distributed.skip_if_rocm": "use skip_if_rocm_multiprocess",
    f"{OUR_KIT}.hypothesis_utils": "use parametrize with explicit cases",
    f"{OUR_KIT}.launch": "use MultiProcessTestCase, which starts the ranks",
    f"{OUR_KIT}.distributed._spmd": "PyTorch removed the compiler in 2.5",
    OUR_KIT: "PyTorch has nothing like it",
}

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


def mirrored_here() -> Iterator[MirroredModule]:
    """The mirrored modules that exist in this tree."""
    return (module for module in MIRRORED if module.is_here)


def module_on(side: Side, name: str) -> str | None:
    """The counterpart on `side` of a module of the other side; None if it has none."""
    if side is Side.OURS:
        return next((pair.ours for pair in MIRRORED if pair.theirs == name and pair.is_here), None)
    return next((pair.theirs for pair in MIRRORED if pair.ours == name), None)


def split(dotted: str, side: Side) -> tuple[str, str] | None:
    """Split a dotted name after the module that it begins with; None if that module has no counterpart on `side`."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if module_on(side, head := ".".join(parts[:length])) is not None:
            return head, ".".join(parts[length:])
    return None


def moved(theirs: str) -> str | None:
    """Return this dotted name of PyTorch's as other versions of torch have it; None if it never moved."""
    return next((one.hint(theirs) for one in MOVED if theirs in (one.now, one.before)), None)


def instead_of(dotted: str) -> str:
    """Name what to use in PyTorch instead of a name of ours."""
    matching = [name for name in INSTEAD if dotted == name or dotted.startswith(f"{name}.")]
    return INSTEAD[max(matching, key=len)]


def source_of(module: str, root: Path) -> Path | None:
    """The source file of a module below a directory."""
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def installed_torch() -> Path:
    """The directory that contains the installed torch. Does not import it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UserError("torch is not installed for this Python")
    return Path(found.origin).parents[1]
