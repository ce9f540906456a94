"""The points of a rank's run at which a fault can happen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Keeps these frames out of tracebacks: a wrong argument is shown at the line of the user.
__unittest = True
__tracebackhide__ = True

# Operations of c10d by the names that the log of calls has for them.
OPERATIONS = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "gather", "scatter", "gather_into_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "send", "recv"),
)
# Operations of a store that the program calls.
STORE_OPERATIONS = (
    *("set", "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys"),
    *("multi_get", "multi_set", "append"),
)
# These return when they are over, and no program can go on meanwhile.
_SYNCHRONOUS = ("monitored_barrier",)
_PHASES = ("before", "during", "after")


@dataclass(frozen=True)
class Point:
    """A point of one rank's run: the n-th call, operation on a store, step or passage of a mark."""

    where: str
    n: int
    op: str | None = None
    # The name or the description of the group, and its members if the point is given by these.
    group: str | None = None
    members: tuple[int, ...] = ()
    name: str = ""
    phase: str = "before"
    # The process of the rank that passes it; 0 is the first one.
    incarnation: int = 0

    def __str__(self) -> str:
        words = [repr(self.name)] if self.where == "mark" else []
        words += [str(self.n)] if self.where != "mark" or self.n > 1 else []
        words += [repr(self.op)] if self.where == "call" and self.op else []
        words += [f"op={self.op!r}"] if self.where == "store" and self.op else []
        words += [f"group={self.members or self.group!r}"] if self.members or self.group else []
        words += [f"phase={self.phase!r}"] if self.phase != "before" else []
        words += [f"incarnation={self.incarnation}"] if self.incarnation else []
        return f"{self.where}({', '.join(words)})"

    @property
    def counted(self) -> str:
        """The noun of that of which this is the n-th."""
        of_group = f" in group {self.members or self.group}" if self.members or self.group else ""
        nouns = {
            "call": f"{self.op or 'collective'} call{{s}}{of_group}",
            "store": f"{self.op} operation{{s}} on a store" if self.op else "operation{s} on a store",
            "step": "optimizer step{s}",
            "mark": f"passage{{s}} of {self.name!r}",
        }
        return nouns[self.where]


def call(n: int, op: str | None = None, group: Any = None, phase: str = "before", incarnation: int = 0) -> Point:
    """The n-th collective or message that the rank issues: of this operation, in this group.

    `group`: its name, its description, or the ranks of its members. `phase`: before the rank has issued the call;
    during it, when a peer has not yet; or after it, when it is over in this rank. `incarnation`: the process
    of the rank, where that is started again; each counts for itself.
    """
    if isinstance(n, str):
        number = op if isinstance(op, int) else 1
        raise ValueError(f"call({n!r}): the number comes first, as in call({number}, {n!r})")
    if op is not None and op not in OPERATIONS:
        raise ValueError(f"call({n}, {op!r}): there is no such operation.{_nearest(op, OPERATIONS)}")
    if phase == "during" and op in (*_SYNCHRONOUS, "send"):
        why = "returns only when it is over" if op in _SYNCHRONOUS else "may be over before its receiver comes"
        raise ValueError(f"call({n}, {op!r}, phase='during'): {op} {why}; use phase='before' or 'after'")
    is_name = group is None or (isinstance(group, str) and group)
    members = () if is_name else checked_ranks(group, f"call({n}, group={group!r})", "a group: its name")
    return _point(Point("call", n, op, group if is_name else None, members, phase=phase, incarnation=incarnation))


def store(n: int, op: str | None = None, phase: str = "before", incarnation: int = 0) -> Point:
    """The n-th operation on a store that the program calls: `set`, `get`, `wait` or another."""
    if op is not None and op not in STORE_OPERATIONS:
        raise ValueError(f"store({n}, op={op!r}): there is no such operation.{_nearest(op, STORE_OPERATIONS)}")
    return _point(Point("store", n, op, phase=phase, incarnation=incarnation))


def step(n: int, phase: str = "before", incarnation: int = 0) -> Point:
    """The n-th `step()` of an optimizer of torch."""
    return _point(Point("step", n, phase=phase, incarnation=incarnation))


def mark(name: str, n: int = 1, incarnation: int = 0) -> Point:
    """The n-th time that the code under test passes `fault_point(name)`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"mark({name!r}): give the name that the code gives to fault_point")
    return _point(Point("mark", n, name=name, incarnation=incarnation))


def _nearest(op: object, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(op), known)
    return f" Did you mean: {', '.join(near)}?" if near else f" Known are {', '.join(known)}"


def _point(point: Point) -> Point:
    if isinstance(point.n, bool) or not isinstance(point.n, int) or point.n < 1:
        raise ValueError(f"{point.where}: n is {point.n!r}; the first has number 1, so give 1 or more")
    if isinstance(point.incarnation, bool) or not isinstance(point.incarnation, int) or point.incarnation < 0:
        raise ValueError(f"{point.where}: incarnation is {point.incarnation!r}; the first process has number 0")
    if point.phase not in _PHASES:
        raise ValueError(f"{point}: known phases are {', '.join(_PHASES)}")
    if point.phase == "during" and point.where != "call":
        raise ValueError(f"{point}: only calls can be in flight; use phase='before' or 'after'")
    return point


def checked_rank(rank: Any, what: str) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"{what}: a rank is a number, 0 or more")
    return rank


def checked_ranks(ranks: Any, what: str, other: str) -> tuple[int, ...]:
    """Some ranks, at least one. `other`: what else could be given."""
    if isinstance(ranks, str) or not isinstance(ranks, Iterable) or not (ranks := tuple(ranks)):
        raise ValueError(f"{what}: give {other}, or a list of ranks")
    return tuple(sorted(checked_rank(rank, what) for rank in ranks))
