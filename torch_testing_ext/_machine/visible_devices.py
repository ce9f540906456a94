"""The names of the accelerators that a mask leaves visible, and the masks that show some of them. Pure.

An inherited mask is respected: devices have the names that it gives them (numbers, UUIDs, MIG instances), and a lease
is written to the same variable. The driver decides how many entries of a mask count: it stops reading at the first
unknown entry, and shows no device if one is named twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

# An empty mask hides everything from CUDA, nothing from HIP: no device has this number.
NONE = "-1"
# By kind of accelerator: the variables that mask it, the one that takes precedence first.
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # These number the devices that ROCR_VISIBLE_DEVICES leaves.
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def visible_names(environ: Mapping[str, str], kind: str, count: int) -> tuple[str, ...]:
    """The names of the `count` devices that a process with this environment sees."""
    masks = [environ[name] for name in MASKS.get(kind, ()) if environ.get(name)]
    if not masks:
        return tuple(map(str, range(count)))
    # In Level Zero, 0.1 is a part of a device.
    read = str.strip if kind == "xpu" else _as_cuda_reads
    entries = [read(entry) for entry in masks[0].split(",")]
    if is_mig(entries[0]):
        return _mig_instances(entries)
    return tuple(entries[:count])


def by_uuid(names: Sequence[str], uuids: Sequence[str]) -> dict[str, str]:
    """The identity of each device, by name; empty if the UUIDs tell none."""
    are_known = len(uuids) == len(names)
    are_different = len(uuids) == len(set(uuids))
    if not are_known or not are_different or any(map(is_mig, names)):
        return {}
    return dict(zip(names, uuids, strict=True))


def identity(kind: str | None, name: str, uuids: Mapping[str, str]) -> str:
    """The identity of a device on this machine: its UUID if it is known, else its number, each with its kind."""
    return f"{kind}-{uuids.get(name, name)}"


def masks_for(names: Sequence[str], kind: str | None) -> dict[str, str]:
    """The variables that show exactly these devices."""
    variables = MASKS.get(kind or "", ())
    mask = ",".join(names) or NONE
    return dict.fromkeys(variables, mask)


def bare_uuid(uuid: str) -> str:
    """A UUID as torch gives it: without NVML's prefix. Older ones of MIG instances are MIG-GPU-.../1/0."""
    return uuid.lower().removeprefix("mig-").removeprefix("gpu-")


def is_mig(name: str) -> bool:
    return name.startswith("MIG-")


def _mig_instances(entries: Sequence[str]) -> tuple[str, ...]:
    """All MIG instances, of which a process would see one, up to the first entry that is none or a duplicate."""
    instances: list[str] = []
    for entry in entries:
        if not is_mig(entry) or entry in instances:
            break
        instances.append(entry)
    return tuple(instances)


def _as_cuda_reads(entry: str) -> str:
    """A number as C reads it: without leading blanks, a leading sign and trailing characters."""
    number = re.match(r"\s*\+?0*(\d+)", entry)
    return number[1] if number else entry.strip()


_HIDES_THE_REST = ("-1", "", "NoDevFiles")


def problem_of_mask(environ: Mapping[str, str], kind: str | None, count: int, known: Known | None = None) -> str | None:
    """Say which device a mask names that is not there; None if there is none.

    `count`: how many devices the driver shows with the mask. `known`: whether the machine has a device of this name;
    None if that cannot be asked. Without an answer, a mask that shows no device at all may just as well be one that
    was set on a machine without devices.
    """
    for variable in _ORDER.get(kind or "cuda", ()):
        mask = environ.get(variable)
        if mask is None:
            continue
        problem = _problem(_entries(mask), count, known)
        if problem:
            return f"{variable}={mask} {problem}"
        if kind != "hip":
            return None
    return None


Known = Callable[[str], bool]
# For ROCm, the mask of the runtime below comes first: the others number what it leaves.
_ORDER = {**MASKS, "hip": ("ROCR_VISIBLE_DEVICES", *MASKS["hip"])}


def _entries(mask: str) -> list[str]:
    """The entries of a mask, up to one that hides the rest."""
    entries: list[str] = []
    for text in mask.split(","):
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
            if not known(entry):
                return f"names a device that is not there: {entry}"
    # torch may be built for no device.
    if not entries or (count == 0 and known is None):
        return None
    if not count:
        for entry in entries:
            if entries.count(entry) > 1:
                return f"names device {entry} twice, so that none is visible"
        return None
    # A process sees one MIG instance of several.
    expected = 1 if is_mig(entries[0]) else len(entries)
    if count < expected:
        return f"names a device that is not there: {entries[count]}"
    return None
