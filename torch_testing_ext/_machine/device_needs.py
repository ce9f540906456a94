"""Facts about a device before a test uses it, and the needs that tests may have of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_testing_ext._machine.backend_names import names_in
from torch_testing_ext._process.words import size_in_words

# Among more groups of devices than these, no further ones are looked at: far more than 16 devices have.
_MOST_GROUPS = 50_000


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device that do not change."""

    # The model.
    name: str = ""
    # Its memory in bytes; 0 if unknown.
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

    # The bytes of memory that it must have.
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
        """Whether something is needed that one device alone cannot have."""
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


def for_backend(backend: str | None) -> str:
    """A backend of accelerators as the reason for a need of devices: ` for the backend nccl`; "" for another one."""
    return f" for the backend {backend}" if backend and not {"gloo", "mpi", "fake"} & {*names_in(backend)} else ""


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
    """Whether a device is connected with the one of that number as the needs say."""
    if needs.nvlink and other not in (device.nvlinks or ()):
        return False
    return not needs.peer_access or other in device.peers
