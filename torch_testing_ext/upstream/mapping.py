"""The table of the modules of PyTorch's test kit and ours that mirror them.

Running, importing and patching all read it. Names are the same on both sides, except for `MOVED`.
"""

import enum
import importlib.util
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
    *(
        MirroredModule(f"torch.distributed.{name}", f"{OUR_KIT}.distributed.{name}", until=(2, 5))
        for name in ("_spmd", "_spmd.api", "_spmd.parallel_mode")
    ),
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


def find_source(module: str) -> Path:
    """The source file of a module of the installed torch."""
    file = source_of(module, installed_torch())
    if file is None:
        raise UserError(f"the installed torch has no module {module}")
    return file
