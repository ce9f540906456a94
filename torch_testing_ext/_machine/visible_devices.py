"""The names of the accelerators that a mask leaves visible, and the masks that show some of them. Pure.

A mask that the user has set passes through: each of its entries is a device with that name (a number, a UUID, a part
of a GPU), and a lease is written to the same variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch_testing_ext._machine.device_masks import masks_of

# An empty mask hides everything from CUDA, nothing from HIP: no device has this number.
NONE = "-1"


def visible_names(environ: Mapping[str, str], kind: str, count: int) -> tuple[str, ...]:
    """The names of the devices that a process with this environment may use: all `count`, or those of its mask."""
    masks = [environ[name] for name in masks_of(kind) if environ.get(name)]
    if not masks:
        return tuple(map(str, range(count)))
    return tuple(dict.fromkeys(entries_of(masks[0], kind)))


def by_uuid(names: Sequence[str], uuids: Sequence[str]) -> dict[str, str]:
    """The identity of each device, by name; empty if the UUIDs tell none."""
    are_known = len(uuids) == len(names)
    are_different = len(uuids) == len(set(uuids))
    if not are_known or not are_different:
        return {}
    return dict(zip(names, uuids, strict=True))


def identity_of_device(kind: str | None, name: str, uuids: Mapping[str, str]) -> str:
    """The identity of a device on this machine: its UUID if it is known, else its number, each with its kind."""
    return f"{kind}-{uuids.get(name, name)}"


def masks_for(names: Sequence[str], kind: str | None) -> dict[str, str]:
    """The variables that show exactly these devices."""
    if kind is None:
        return {}
    mask = ",".join(names) or NONE
    return dict.fromkeys(masks_of(kind), mask)


def bare_uuid(uuid: str) -> str:
    """A UUID as torch gives it: without NVML's prefix."""
    return uuid.lower().removeprefix("gpu-")


def is_part_of_gpu(name: str) -> bool:
    """Whether this names a part of a GPU in MIG mode. NVML is not asked for those, and CUDA shows one alone."""
    return name.startswith("MIG-")


# CUDA and the others read 0-3 as 0.
_KINDS_WITH_RANGES = ("neuron",)


def _without_ranges(mask: str, kind: str) -> list[str]:
    """The entries of a mask, with all numbers of a range such as 0-3."""
    entries: list[str] = []
    for entry in mask.split(","):
        numbers = re.fullmatch(r"\s*(\d+)-(\d+)\s*", entry) if kind in _KINDS_WITH_RANGES else None
        entries += map(str, range(int(numbers[1]), int(numbers[2]) + 1)) if numbers else [entry]
    return entries


def _as_cuda_reads(entry: str) -> str:
    """A number as C reads it: without leading blanks, a leading sign and trailing characters."""
    number = re.match(r"\s*\+?0*(\d+)", entry)
    return number[1] if number else entry.strip()


_HIDES_THE_REST = ("-1", "", "NoDevFiles")


def problem_of_mask(environ: Mapping[str, str], kind: str | None, count: int, known: Known | None = None) -> str | None:
    """Say which device a mask names that is not there; None if there is none.

    `count`: how many devices the driver shows with the mask: those up to the first entry that it does not know.
    `known`: whether the machine has a device of this name; None if that cannot be asked. Without an answer, a mask that
    shows no device at all may just as well be one that was set on a machine without devices.
    """
    kind = kind or "cuda"
    for variable in _BELOW.get(kind, ()) + masks_of(kind):
        mask = environ.get(variable)
        if mask is None:
            continue
        problem = _problem(entries_of(mask, kind), count, known)
        if problem:
            return f"{variable}={mask} {problem}"
        if kind != "hip":
            return None
    return None


Known = Callable[[str], bool]
# The mask of a runtime below, which comes first: the others number what it leaves.
_BELOW = {"hip": ("ROCR_VISIBLE_DEVICES",)}


def entries_of(mask: str, kind: str) -> list[str]:
    """The entries of a mask, up to one that hides the rest."""
    entries: list[str] = []
    for text in _without_ranges(mask, kind):
        # In Level Zero, 0.1 is a part of a device.
        entry = text.strip() if "." in text else _as_cuda_reads(text)
        if entry in _HIDES_THE_REST:
            break
        entries.append(entry)
    return entries


def _problem(entries: Sequence[str], count: int, known: Known | None) -> str | None:
    """Say what is wrong with the entries of a mask; None if nothing is."""
    if known is not None:
        for entry in entries:
            if not is_part_of_gpu(entry) and not known(entry):
                return f"names a device that is not there: {entry}"
    # torch may be built for no device.
    if not entries or (count == 0 and known is None):
        return None
    if not count:
        for entry in entries:
            if entries.count(entry) > 1:
                return f"names device {entry} twice, so that none is visible"
        return None
    if known is None and count < len(entries) and not is_part_of_gpu(entries[count]):
        return f"names a device that is not there: {entries[count]}"
    return None
