"""Facts about a device before a test uses it, and the needs that tests may have of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_testing_ext._process.words import size_in_words

# Among more groups of devices than these, no further ones are looked at: far more than 16 devices have.
_MOST_GROUPS = 50_000


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device that do not change."""

    name: str = ""  # the model
    memory: int = 0  # in bytes; 0 if unknown
    capability: tuple[int, int] = (0, 0)  # the compute capability, for CUDA
    peers: tuple[int, ...] = ()  # the numbers of devices whose memory it can read
    nvlinks: tuple[int, ...] | None = None  # the numbers of devices that NVLink connects it to; None if unknown


@dataclass(frozen=True)
class DeviceNeeds:
    """The needs of a test of each device that it uses, besides their number."""

    memory: int = 0  # in bytes
    capability: tuple[int, int] = (0, 0)
    peer_access: bool = False  # each can read the memory of each other one
    nvlink: bool = False  # NVLink connects each with each other one

    def __bool__(self) -> bool:
        return self != DeviceNeeds()

    @property
    def of_several(self) -> bool:
        """Is something needed that one device alone cannot have?"""
        return self.peer_access or self.nvlink

    @classmethod
    def of_all(cls, needs: Iterable[DeviceNeeds]) -> DeviceNeeds:
        """Joins needs: a device that meets the result meets each of them."""
        found = list(needs)
        return cls(
            max((one.memory for one in found), default=0),
            max((one.capability for one in found), default=(0, 0)),
            any(one.peer_access for one in found),
            any(one.nvlink for one in found),
        )

    def __str__(self) -> str:
        parts = [f"{size_in_words(self.memory)} of memory"] if self.memory else []
        parts += [f"compute capability {'.'.join(map(str, self.capability))}"] if any(self.capability) else []
        parts += ["peer access"] if self.peer_access else []
        parts += ["NVLink"] if self.nvlink else []
        return " and ".join(parts)


NO_NEEDS = DeviceNeeds()


def facts_from(answer: Sequence[dict[str, Any]]) -> tuple[DeviceFacts, ...]:
    """The facts that another process has sent as JSON."""
    return tuple(
        DeviceFacts(one["name"], one["memory"], (one["capability"][0], one["capability"][1]), tuple(one["peers"]))
        for one in answer
        if isinstance(one, dict)
    )


def renumbered(facts: Sequence[DeviceFacts], chosen: Sequence[int]) -> tuple[DeviceFacts, ...]:
    """The facts of the chosen devices, which are numbered in this order from now on."""
    number = {old: new for new, old in enumerate(chosen)}

    def kept(others: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[other] for other in others if other in number)

    return tuple(
        replace(
            facts[old],
            peers=kept(facts[old].peers),
            nvlinks=None if facts[old].nvlinks is None else kept(facts[old].nvlinks or ()),
        )
        for old in chosen
    )


def suits(facts: DeviceFacts, needs: DeviceNeeds) -> bool:
    return facts.memory >= needs.memory and facts.capability >= needs.capability


def why_not(facts: Sequence[DeviceFacts], needs: DeviceNeeds, count: int = 1) -> str | None:
    """Say why no `count` of these devices meet the needs, to follow "needs ...: "; None if some do."""
    if next(groups(facts, needs, count), None) is not None:
        return None
    if not facts:
        return "there is no device of which this is known"
    fitting = [number for number, one in enumerate(facts) if suits(one, needs)]
    if len(fitting) < count:
        others = (_lacking(one, needs) for number, one in enumerate(facts) if number not in fitting)
        best = "; ".join(dict.fromkeys(others))
        return f"{len(fitting) or 'none'} of {len(facts)} devices, {count} needed ({best})"
    if needs.nvlink and any(facts[number].nvlinks is None for number in fitting):
        return "NVML does not say which devices NVLink connects"
    return "NVLink does not connect them" if needs.nvlink else "they cannot read each other's memory"


def _lacking(facts: DeviceFacts, needs: DeviceNeeds) -> str:
    has = [size_in_words(facts.memory)] if facts.memory < needs.memory else []
    has += [".".join(map(str, facts.capability))] if facts.capability < needs.capability else []
    return f"{facts.name or 'a device'} has {' and '.join(has)}"


def groups(
    facts: Sequence[DeviceFacts], needs: DeviceNeeds, count: int, among: Iterable[int] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield the groups of `count` devices, by their numbers, that meet the needs. `among`: those to choose from."""
    chosen = range(len(facts)) if among is None else among
    fitting = [number for number in chosen if suits(facts[number], needs)]
    for group in itertools.islice(itertools.combinations(fitting, count), _MOST_GROUPS):
        if all(_connected(facts, needs, one, other) for one, other in itertools.permutations(group, 2)):
            yield group


def _connected(facts: Sequence[DeviceFacts], needs: DeviceNeeds, one: int, other: int) -> bool:
    if needs.nvlink and other not in (facts[one].nvlinks or ()):
        return False
    return not needs.peer_access or other in facts[one].peers
