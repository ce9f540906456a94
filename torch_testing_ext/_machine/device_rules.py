"""Devices as data: facts, needs, masks, backends, and the rules by which ranks share them.

Pure: nothing here asks a device.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_testing_ext._process.words import size_in_words

from .device_masks import masks_of

# --------------------------------------------------------------------------------------------------------------------
# The names of torch.distributed's backends, as tests write them: "nccl2", "cpu:gloo,cuda:nccl".

# torch 2.15 has them all: "nccl" is then what "nccl2" is, and "nccl-legacy" what "nccl" was before.
NCCL = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")


def names_in(backend: str) -> list[str]:
    """Split "cpu:gloo,cuda:nccl", for example, into gloo and nccl."""
    names = []
    for part in backend.split(","):
        _, _, name = part.rpartition(":")
        names.append(name.strip().lower())
    return names


def uses_nccl(backend: str | None) -> bool:
    """Is this NCCL, under any of its names, for any type of device?"""
    names = names_in(backend or "")
    return any(name in NCCL for name in names)


# --------------------------------------------------------------------------------------------------------------------
# Facts about a device before a test uses it, and the needs that tests may have of it. Pure.

# Among more groups of devices than these, no further ones are looked at: far more than 16 devices have.
_MOST_GROUPS = 50_000


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device that do not change."""

    # The model.
    name: str = ""
    # In bytes; 0 if unknown.
    memory: int = 0
    # The compute capability, for CUDA.
    capability: tuple[int, int] = (0, 0)
    # The numbers of devices whose memory it can read.
    peers: tuple[int, ...] = ()
    # The numbers of devices that NVLink connects it to; None if unknown.
    nvlinks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DeviceNeeds:
    """The needs of a test of each device that it uses, besides their number."""

    # In bytes.
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    # Each can read the memory of each other one.
    peer_access: bool = False
    # NVLink connects each with each other one.
    nvlink: bool = False

    def __bool__(self) -> bool:
        return self != DeviceNeeds()

    @property
    def of_several(self) -> bool:
        """Is something needed that one device alone cannot have?"""
        return self.peer_access or self.nvlink

    @classmethod
    def of_all(cls, needs: Iterable[DeviceNeeds]) -> DeviceNeeds:
        """Join needs: a device that meets the result meets each of them."""
        joined = cls()
        for need in needs:
            joined = cls(
                max(joined.memory, need.memory),
                max(joined.capability, need.capability),
                joined.peer_access or need.peer_access,
                joined.nvlink or need.nvlink,
            )
        return joined

    def __str__(self) -> str:
        parts = []
        if self.memory:
            parts.append(f"{size_in_words(self.memory)} of memory")
        if any(self.capability):
            parts.append(f"compute capability {_version(self.capability)}")
        if self.peer_access:
            parts.append("peer access")
        if self.nvlink:
            parts.append("NVLink")
        return " and ".join(parts)


def _version(capability: tuple[int, int]) -> str:
    major, minor = capability
    return f"{major}.{minor}"


NO_NEEDS = DeviceNeeds()


def facts_from(answer: Sequence[dict[str, Any]]) -> tuple[DeviceFacts, ...]:
    """The facts that another process has sent as JSON."""
    facts = []
    for device in answer:
        if isinstance(device, dict):
            major, minor = device["capability"]
            peers = tuple(device["peers"])
            facts.append(DeviceFacts(device["name"], device["memory"], (major, minor), peers))
    return tuple(facts)


def facts_of_chosen(facts: Sequence[DeviceFacts], chosen: Sequence[int]) -> tuple[DeviceFacts, ...]:
    """The facts of the chosen devices, which are numbered in this order from now on."""
    new_number = {old: new for new, old in enumerate(chosen)}

    def renumber(others: Iterable[int]) -> tuple[int, ...]:
        return tuple(new_number[other] for other in others if other in new_number)

    result = []
    for old in chosen:
        device = facts[old]
        nvlinks = None if device.nvlinks is None else renumber(device.nvlinks)
        result.append(replace(device, peers=renumber(device.peers), nvlinks=nvlinks))
    return tuple(result)


def meets_needs(facts: DeviceFacts, needs: DeviceNeeds) -> bool:
    return facts.memory >= needs.memory and facts.capability >= needs.capability


def why_not(facts: Sequence[DeviceFacts], needs: DeviceNeeds, count: int = 1) -> str | None:
    """Say why no `count` of these devices meet the needs, to follow "needs ...: "; None if some do."""
    if next(groups_that_meet(facts, needs, count), None) is not None:
        return None
    if not facts:
        return "there is no device of which this is known"
    fitting = [device for device in facts if meets_needs(device, needs)]
    if len(fitting) < count:
        others = [_lacking(device, needs) for device in facts if not meets_needs(device, needs)]
        best = "; ".join(dict.fromkeys(others))
        enough = len(fitting) or "none"
        return f"{enough} of {len(facts)} devices, {count} needed ({best})"
    if needs.nvlink and any(device.nvlinks is None for device in fitting):
        return "NVML does not say which devices NVLink connects"
    return "NVLink does not connect them" if needs.nvlink else "they cannot read each other's memory"


def _lacking(facts: DeviceFacts, needs: DeviceNeeds) -> str:
    has = []
    if facts.memory < needs.memory:
        has.append(size_in_words(facts.memory))
    if facts.capability < needs.capability:
        has.append(_version(facts.capability))
    name = facts.name or "a device"
    return f"{name} has {' and '.join(has)}"


def groups_that_meet(
    facts: Sequence[DeviceFacts], needs: DeviceNeeds, count: int, among: Iterable[int] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield the groups of `count` devices, by their numbers, that meet the needs. `among`: those to choose from."""
    chosen = range(len(facts)) if among is None else among
    fitting = [number for number in chosen if meets_needs(facts[number], needs)]
    combinations = itertools.combinations(fitting, count)
    for group in itertools.islice(combinations, _MOST_GROUPS):
        pairs = itertools.permutations(group, 2)
        if all(_are_connected(facts[first], second, needs) for first, second in pairs):
            yield group


def _are_connected(device: DeviceFacts, other: int, needs: DeviceNeeds) -> bool:
    """Is a device connected with the one of that number as the needs say?"""
    if needs.nvlink and other not in (device.nvlinks or ()):
        return False
    return not needs.peer_access or other in device.peers


# --------------------------------------------------------------------------------------------------------------------
# Rules by which ranks share accelerators, where a test has more ranks than there are devices.
#
# Nothing is shared unless the user asks: by torchtest --ranks-per-gpu, or by TORCH_TESTING_EXT_RANKS_PER_GPU.

RANKS_PER_GPU = "TORCH_TESTING_EXT_RANKS_PER_GPU"

# From this version on, NCCL lets several ranks of a communicator use one device, if it is told to.
NCCL_SHARES_SINCE = (2, 30)
# A context of CUDA, the kernels of torch and the buffers of NCCL, which torch's allocator knows nothing of.
CONTEXT = 600 * 2**20
# A rank with less memory than this for its tensors is of no use.
LEAST = 256 * 2**20
# The thread blocks that the collectives of all ranks of a device may occupy together: NCCL hangs if they do not fit.
BLOCKS = 32


def ranks_per_device(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks may share an accelerator; 1 unless the user has asked for more."""
    text = environ.get(RANKS_PER_GPU) or "1"
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ValueError(f"{RANKS_PER_GPU}={text!r} is not valid; use a number of ranks: 1, 2, 3 ...")
    return number


def device_of(rank: int, devices: int) -> int:
    """Return the number of the device that a rank uses: its own, or the one that it shares."""
    return rank % devices


def ranks_on_device(rank: int, world_size: int, devices: int) -> int:
    """Return how many of the ranks use the device of this rank."""
    first = device_of(rank, devices)
    return len(range(first, world_size, devices))


def fraction_for(total: int, ranks: int) -> float:
    """Return the part of a device's memory that torch's allocator may take in one of the ranks on it."""
    usable = total // ranks - CONTEXT
    return max(usable, LEAST) / total


def why_too_many(ranks: int, total: int, device: str) -> str | None:
    """Say why a device with `total` bytes is too small for so many ranks; None if it is not."""
    share = total // ranks
    needed = CONTEXT + LEAST
    if share >= needed:
        return None
    most = max(1, total // needed)
    share_in_words, whole, least = map(size_in_words, (share, total, needed))
    return (
        f"{ranks} ranks on one GPU would have {share_in_words} each of the {whole} of device {device}, and a "
        f"rank needs {least} before it has a tensor: at most {most}"
    )


# NCCL's own variable. A user for whom its experiment hangs sets it to 0, so that the ranks use gloo.
NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"


def shared_backend(nccl: tuple[int, ...], hip: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the backend of ranks that share a device. `nccl`: NCCL's version, () without NCCL."""
    can_share = not hip and nccl[:2] >= NCCL_SHARES_SINCE and environ.get(NCCL_SHARES) != "0"
    return "nccl" if can_share else "gloo"


def blocks_for(ranks: int) -> int:
    """Return how many thread blocks a collective of NCCL may have in each of the ranks on a device."""
    return max(1, BLOCKS // ranks)


_UNITS = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def read_bytes(text: str) -> int:
    """Convert an amount of memory such as "20 GB", "512MiB" or "1.5 GiB" to bytes."""
    number = text.strip().lower()
    unit = next((name for name in _UNITS if number.endswith(name)), "")
    try:
        amount = float(number.removesuffix(unit)) if unit else 0.0
    except ValueError:
        amount = 0.0
    if not 0 < amount < 2**20:
        raise ValueError(f"{text!r} is not an amount of memory: write a number and a unit, such as 20 GB or 512 MiB")
    return int(amount * _UNITS[unit])


# --------------------------------------------------------------------------------------------------------------------
# The names of the accelerators that a mask leaves visible, and the masks that show some of them. Pure.
#
# A mask that the user has set passes through: each of its entries is a device with that name (a number, a UUID, a part
# of a GPU), and a lease is written to the same variable.

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
