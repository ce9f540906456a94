"""The facts of what one rank has issued: how many calls, how many bytes, at which lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults.points import OPERATIONS

from .issued_calls import Call, GroupRecord, RankRecord

_BITS = re.compile(r"\d+")
# The endings of the forms of one operation, such as all_gather_into_tensor.
_FORMS = ("", "_into_tensor", "_tensor", "_single")
_BYTES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16}


class _Told:
    """A number that tells in its representation where it comes from, as a failed assertion shows it."""

    # int or float.
    plain: Any
    lines: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self!s} ({'; '.join(self.lines)})" if self.lines else str(self)

    def __str__(self) -> str:
        return str(self.plain.__repr__(self))

    def __reduce__(self) -> Any:
        return self.plain, (self.plain(self),)


class Amount(_Told, int):
    """A number of calls, bytes or waits, which tells the places that they come from."""

    plain = int

    @classmethod
    def at(cls, places: Counter[str]) -> Amount:
        """The sum of the numbers of places."""
        amount = cls(places.total())
        amount.lines = tuple(f"{number} by {place}" for place, number in places.most_common())
        return amount


class Share(_Told, float):
    """A part of a whole, from 0 to 1, which tells what is not of it."""

    plain = float


class RankFacts:
    """All that one rank has issued, after the fact."""

    def __init__(self, record: RankRecord, modules: Mapping[int, str] = MappingProxyType({})):
        """`modules`: by the order of a call, the name of the module that has issued it."""
        self.record = record
        self._modules = modules

    def calls(self, group: str | None = None, op: str | None = None) -> Amount:
        """Count the calls of one operation, in the groups of a name or of a dimension of a mesh.

        "all_gather" stands for all its forms, such as "all_gather_into_tensor". Raises ValueError for another word.
        """
        return self._amount([(call, 1) for call in self.issued(group, op)])

    def bytes(self, group: str | None = None, op: str | None = None) -> Amount:
        """Add up the bytes that the rank handed over as inputs of these calls."""
        return self._amount_of_bytes(self.issued(group, op))

    def bytes_across(self, ranks_of_node: int, group: str | None = None, op: str | None = None) -> Amount:
        """Add up the bytes handed over in groups with members on several nodes, of so many ranks each."""
        return self._amount_of_bytes(
            call
            for known, call in self.issued_in(group, op)
            if len({member // ranks_of_node for member in known.members}) > 1
        )

    def issued(self, group: str | None = None, op: str | None = None) -> Iterator[Call]:
        """Yield the calls in groups of a name, of one operation."""
        return (call for _, call in self.issued_in(group, op))

    def issued_in(self, group: str | None = None, op: str | None = None) -> Iterator[tuple[GroupRecord, Call]]:
        """Yield the same with their groups."""
        kinds = None if op is None else self._kinds_of(op)
        return (
            (known, call)
            for known, call in self.with_groups()
            if (group is None or has_name(known, group)) and (kinds is None or call.kind in kinds)
        )

    def _kinds_of(self, op: str) -> frozenset[str]:
        """The operation of this name, in all its forms."""
        known = {*OPERATIONS, *(call.kind for _, call in self.with_groups())}
        # Newer versions of torch end the names of the forms into one tensor so.
        stem = op if op in known else op.removesuffix("_single")
        forms = _FORMS if stem == op else ("_into_tensor", "_tensor")
        kinds = {f"{stem}{form}{coalesced}" for form in forms for coalesced in ("", "_coalesced")} & known
        if not kinds:
            raise ValueError(f"there is no operation {op!r}.{nearest(op, known)}")
        return frozenset(kinds)

    def with_groups(self) -> Iterator[tuple[GroupRecord, Call]]:
        """Yield each call with its group."""
        for by_key in (self.record.calls, self.record.messages):
            for key, calls in by_key.items():
                yield from ((self.record.groups[key], call) for call in calls)

    def place_of(self, call: Call) -> str:
        """The line of a call, and the module that it was issued for."""
        module = self._modules.get(call.order, "")
        return f"{call.site or 'line unknown'}{f', in {module}' if module else ''}"

    def _amount_of_bytes(self, calls: Iterable[Call]) -> Amount:
        return self._amount([(call, bytes_of(call)) for call in calls])

    def _amount(self, counted: Iterable[tuple[Call, int]]) -> Amount:
        places: Counter[str] = Counter()
        for call, number in counted:
            places[f"{call.kind} at {self.place_of(call)}"] += number
        return Amount.at(places)


def has_name(group: GroupRecord, name: str) -> bool:
    """Whether a test may call a group by this name."""
    return name in group.names or (group.is_default and name == "world")


def bytes_of(call: Call) -> int:
    """The bytes that a rank hands over to a call."""
    return sum(map(_bytes_of, call.given))


def _bytes_of(tensor: str) -> int:
    """The bytes of a tensor in words, such as `[4, 8] float32`."""
    shape, _, dtype = tensor.rpartition(" ")
    elements = 1
    for size in _BITS.findall(shape):
        elements *= int(size)
    bits = _BITS.search(dtype)
    # Elements below a byte are stored in one.
    return elements * _BYTES.get(dtype, max(1, int(bits.group()) // 8) if bits else 1)
