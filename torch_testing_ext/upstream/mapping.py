"""Which module of PyTorch's test kit is which of ours: the one table that running, importing, patching and coverage
read. Names are the same on both sides, except for those listed as moved."""

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


class Mistake(ValueError):
    """What the user can mend: said in one line, without a traceback of ours."""


class Side(enum.Enum):
    """Where a file that is to be written belongs."""

    OURS = "torch_testing_ext"
    THEIRS = "PyTorch"


@dataclass(frozen=True)
class Mirrored:
    """A module that both have. `until`: the first torch that has it no more."""

    theirs: str
    ours: str
    until: Version | None = None

    @property
    def is_here(self) -> bool:
        return source_of(self.ours, PACKAGE.parent) is not None


@dataclass(frozen=True)
class Moved:
    """A name that PyTorch has elsewhere, or calls otherwise, since a version of torch. Ours are where they are now."""

    now: str
    before: str
    since: Version

    def hint(self, dotted: str) -> str:
        version = ".".join(map(str, self.since))
        if dotted == self.now:
            return f"before torch {version} it is {self.before}"
        return f"since torch {version} it is {self.now}"


def _kit(*names: str) -> tuple[Mirrored, ...]:
    return tuple(Mirrored(f"{THEIR_KIT}.{name}", f"{OUR_KIT}.{name}") for name in names)


MIRRORED = (
    *_kit(
        "common_utils",
        "common_distributed",
        "common_fsdp",
        "common_dist_composable",
        "distributed.fake_pg",
        "distributed.multi_threaded_pg",
        "distributed.checkpoint_utils",
        "distributed.common_state_dict",
        "distributed.distributed_utils",
        "distributed._tensor.common_dtensor",
    ),
    Mirrored("torch.distributed._spmd", f"{OUR_KIT}.distributed._spmd", until=(2, 5)),
)

MOVED = (
    Moved(
        now=f"{THEIR_KIT}.common_distributed.run_subtests",
        before=f"{THEIR_KIT}.common_fsdp.run_subtests",
        since=(2, 4),
    ),
    Moved(
        now=f"{THEIR_KIT}.common_distributed.MultiProcContinuousTest",
        before=f"{THEIR_KIT}.common_distributed.MultiProcContinousTest",
        since=(2, 9),
    ),
)

# Outside of their kit, and yet bases of test classes.
OTHER_TEST_BASES = ("torch._dynamo.test_case", "torch._inductor.test_case")

# The bases that start ranks, by the module that PyTorch defines them in.
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


def here() -> Iterator[Mirrored]:
    """The modules that we have."""
    return (module for module in MIRRORED if module.is_here)


def module_on(side: Side, name: str) -> str | None:
    """The counterpart of a module on that side; None where it has none."""
    if side is Side.OURS:
        return next((pair.ours for pair in MIRRORED if pair.theirs == name and pair.is_here), None)
    return next((pair.theirs for pair in MIRRORED if pair.ours == name), None)


def split(dotted: str, side: Side) -> tuple[str, str] | None:
    """Where a dotted name begins with a module that has a counterpart on `side`: that module, and the rest."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if module_on(side, head := ".".join(parts[:length])) is not None:
            return head, ".".join(parts[length:])
    return None


def moved(theirs: str) -> str | None:
    """Where else a name of PyTorch's is found, by a dotted name that is not there."""
    return next((one.hint(theirs) for one in MOVED if theirs in (one.now, one.before)), None)


def source_of(module: str, root: Path) -> Path | None:
    """The file of a module below a directory of sources."""
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def installed_torch() -> Path:
    """The directory that holds the installed torch, which is not imported for it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise Mistake("torch is not installed for this Python: name a checkout of PyTorch instead")
    return Path(found.origin).parents[1]
