"""Faults with expected deaths: what happens to which rank, at which point of a test, and what must follow."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import pickle
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from torch_testing_ext import fault_points
from torch_testing_ext.fault_points import fault_point as fault_point, reached as reached

# Keeps these frames out of tracebacks.
__unittest = True

T = TypeVar("T")

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
_WHERE = ("call", "store", "step", "mark")
# By fault: the exit code of a process that ends by it.
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}
# The attribute of a test that has them.
PLAN = "_torch_testing_ext_faults"


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

    def __str__(self) -> str:
        words = [repr(self.name)] if self.where == "mark" else []
        words += [str(self.n)] if self.where != "mark" or self.n > 1 else []
        words += [repr(self.op)] if self.where == "call" and self.op else []
        words += [f"op={self.op!r}"] if self.where == "store" and self.op else []
        words += [f"group={self.members or self.group!r}"] if self.members or self.group else []
        words += [f"phase={self.phase!r}"] if self.phase != "before" else []
        return f"{self.where}({', '.join(words)})"

    @property
    def counted(self) -> str:
        """The noun of that of which this is the n-th."""
        of_group = f" in group {self.members or self.group}" if self.members or self.group else ""
        nouns = {
            "call": f"{self.op or 'collective'} call{{s}}{of_group}",
            "store": f"operation{{s}} {self.op} on a store" if self.op else "operation{s} on a store",
            "step": "optimizer step{s}",
            "mark": f"passage{{s}} of {self.name!r}",
        }
        return nouns[self.where]


@dataclass(frozen=True)
class PlannedFault:
    """A fault: what happens to one rank at one point."""

    kind: str
    rank: int | None = None
    at: Point | None = None
    # How long it lasts; None: until it is healed, or for good.
    seconds: float | None = None
    code: int = 0
    # A pickled exception, and its type.
    error: bytes = b""
    error_type: str = ""

    @property
    def word(self) -> str:
        """The word that asks a drill for it: `fault_of_word` reads it."""
        value = {"exits": str(self.code), "raises": self.error_type}.get(self.kind, "")
        value = value or ("" if self.seconds is None else f"{self.seconds:g}")
        return f"{self.kind}:{value}" if value else self.kind

    def __str__(self) -> str:
        own = {"exits": [str(self.code)], "raises": [self.error_type]}.get(self.kind, [])
        own += [f"{self.seconds:g}"] if self.seconds is not None else []
        own += [f"rank={self.rank}"] if self.rank is not None else []
        own += [f"at={self.at}"] if self.at is not None else []
        return f"{self.kind}({', '.join(own)})"

    @property
    def exit_code(self) -> int | None:
        """The exit code of the rank that dies by it, negative for a signal; None if it need not end the process."""
        if self.kind == "exits":
            return self.code
        return -_SIGNALS[self.kind] if self.kind in _SIGNALS else None

    @property
    def is_deadly(self) -> bool:
        return self.exit_code is not None

    @property
    def did(self) -> str:
        """The verb for what has happened to the rank."""
        verbs = {"kill": "was killed", "segv": "was ended by SIGSEGV", "abort": "was ended by SIGABRT"}
        verbs |= {"exits": f"exited with code {self.code}", "raises": f"raised {self.error_type}"}
        verbs |= {"stop": "was stopped", "slow": "was delayed", "hold_gil": "held the GIL"}
        return verbs[self.kind]


@dataclass(frozen=True)
class PlannedRestart:
    """The rank is started again when it has died by a fault."""

    rank: int


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a test, and what must follow."""

    faults: tuple[PlannedFault, ...] = ()
    restarts: tuple[int, ...] = ()
    within: float | None = None
    must_reach: tuple[str, ...] = ()

    @property
    def victims(self) -> frozenset[int]:
        """The ranks that have faults."""
        return frozenset(fault.rank for fault in self.faults if fault.rank is not None)

    @property
    def stopped_for_good(self) -> frozenset[int]:
        """The ranks that a fault stops until another rank heals them."""
        stops = [fault for fault in self.faults if fault.kind == "stop" and fault.seconds is None]
        return FaultPlan(tuple(stops)).victims

    def why_not(self, world_size: int) -> str:
        """Why this plan is impossible for so many ranks, with the remedy; "" if it is not."""
        ranks = [*((fault.rank, str(fault)) for fault in self.faults), *((r, f"restart({r})") for r in self.restarts)]
        for rank, what in ranks:
            if rank is not None and rank >= world_size:
                return f"{what}: the test has {world_size} ranks; give a rank from 0 to {world_size - 1}"
        return ""


# -- points


def call(n: int, op: str | None = None, group: Any = None, phase: str = "before") -> Point:
    """The n-th collective or message that the rank issues: of this operation, in this group.

    `group`: its name, its description, or the ranks of its members. `phase`: before the rank has issued the call;
    during it, when a peer has not yet; or after it, when it is over in this rank.
    """
    if op is not None and op not in OPERATIONS:
        raise ValueError(f"call({n}, {op!r}): there is no such operation; known are {', '.join(OPERATIONS)}")
    if phase == "during" and op in (*_SYNCHRONOUS, "send"):
        why = "returns only when it is over" if op in _SYNCHRONOUS else "may be over before its receiver comes"
        raise ValueError(f"call({n}, {op!r}, phase='during'): {op} {why}; use phase='before' or 'after'")
    is_name = group is None or (isinstance(group, str) and group)
    members = () if is_name else _checked_ranks(group, f"call({n}, group={group!r})", "a group: its name")
    return _point(Point("call", n, op, group if is_name else None, members, phase=phase))


def store(n: int, op: str | None = None, phase: str = "before") -> Point:
    """The n-th operation on a store that the program calls: `set`, `get`, `wait` or another."""
    if op is not None and op not in STORE_OPERATIONS:
        raise ValueError(f"store({n}, op={op!r}): there is no such operation; known are {', '.join(STORE_OPERATIONS)}")
    return _point(Point("store", n, op, phase=phase))


def step(n: int, phase: str = "before") -> Point:
    """The n-th `step()` of an optimizer of torch."""
    return _point(Point("step", n, phase=phase))


def mark(name: str, n: int = 1) -> Point:
    """The n-th time that the code under test passes `fault_point(name)`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"mark({name!r}): give the name that the code gives to fault_point")
    return _point(Point("mark", n, name=name))


def _point(point: Point) -> Point:
    if isinstance(point.n, bool) or not isinstance(point.n, int) or point.n < 1:
        raise ValueError(f"{point.where}: n is {point.n!r}; the first has number 1, so give 1 or more")
    if point.phase not in _PHASES:
        raise ValueError(f"{point}: known phases are {', '.join(_PHASES)}")
    if point.phase == "during" and point.where != "call":
        raise ValueError(f"{point}: only calls can be in flight; use phase='before' or 'after'")
    return point


# -- faults


def kill(rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank is killed by SIGKILL."""
    return _fault(PlannedFault("kill", rank, at))


def segv(rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank dies by a segmentation fault."""
    return _fault(PlannedFault("segv", rank, at))


def abort(rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank aborts, as C++ code does for an error that nobody catches."""
    return _fault(PlannedFault("abort", rank, at))


def exits(code: int, rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank's process exits at once with this code."""
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
        raise ValueError(f"exits({code!r}): an exit code is a number from 0 to 255")
    return _fault(PlannedFault("exits", rank, at, code=code))


def raises(
    error: BaseException | type[BaseException], rank: int | None = None, at: Point | None = None
) -> PlannedFault:
    """The call, step or mark raises this exception in the rank."""
    try:
        made = error() if isinstance(error, type) else error
    except TypeError as why:
        raise TypeError(f"raises({error}): {why}; give an exception that is made") from None
    name = type(made).__name__
    if not isinstance(made, BaseException):
        raise ValueError(f"raises({error!r}): give an exception")
    try:
        packed = pickle.dumps(made)
        pickle.loads(packed)
    except Exception as why:
        raise ValueError(f"raises({name}): it cannot be pickled ({why}); define it at the level of a module") from None
    return _fault(PlannedFault("raises", rank, at, error=packed, error_type=name))


def stop(seconds: float | None = None, rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank is stopped by SIGSTOP: for some seconds, or until another rank calls `heal(rank)`."""
    return _fault(PlannedFault("stop", rank, at, seconds))


def slow(seconds: float, rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank sleeps."""
    return _fault(PlannedFault("slow", rank, at, _required("slow", seconds)))


def hold_gil(seconds: float, rank: int | None = None, at: Point | None = None) -> PlannedFault:
    """The rank's Python code stands still in all threads; its C++ code goes on."""
    return _fault(PlannedFault("hold_gil", rank, at, _required("hold_gil", seconds)))


def _required(kind: str, seconds: Any) -> float:
    if not _is_number(seconds):
        raise ValueError(f"{kind}({seconds!r}): give the seconds that it lasts")
    return float(seconds)


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def restart(rank: int) -> PlannedRestart:
    """Let a new process of the rank, once a fault has ended it, run the test from its beginning. See `incarnation`."""
    return PlannedRestart(_checked_rank(rank, f"restart({rank!r})"))


def _checked_rank(rank: Any, what: str) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"{what}: a rank is a number, 0 or more")
    return rank


def _checked_ranks(ranks: Any, what: str, other: str) -> tuple[int, ...]:
    """Some ranks, at least one. `other`: what else could be given."""
    if isinstance(ranks, str) or not isinstance(ranks, Iterable) or not (ranks := tuple(ranks)):
        raise ValueError(f"{what}: give {other}, or a list of ranks")
    return tuple(sorted(_checked_rank(rank, what) for rank in ranks))


def _fault(fault: PlannedFault) -> PlannedFault:
    at = fault.at
    if fault.rank is not None:
        _checked_rank(fault.rank, str(fault))
    if at is not None and not isinstance(at, Point):
        raise ValueError(f"{fault.kind}: at is {at!r}; give a point, such as at=call(3, 'all_reduce')")
    if fault.seconds is not None and not (_is_number(fault.seconds) and fault.seconds > 0):
        raise ValueError(f"{fault.kind}({fault.seconds!r}): give a number of seconds greater than 0")
    return fault


# -- plans


def plan_of(planned: Iterable[Any], within: float | None = None, must_reach: Iterable[str] = ()) -> FaultPlan:
    """Make a plan of the arguments of `@faults`. Raises ValueError, which names the remedy."""
    planned = tuple(planned)
    chosen = tuple(each for each in planned if isinstance(each, PlannedFault))
    restarts = tuple(each.rank for each in planned if isinstance(each, PlannedRestart))
    if len(chosen) + len(restarts) < len(planned) or not chosen:
        raise ValueError("@faults takes faults, such as @faults(kill(rank=1, at=call(3)))")
    for fault in chosen:
        if fault.rank is None or fault.at is None:
            raise ValueError(f"{fault}: say which rank and where: {fault.kind}(..., rank=1, at=call(3))")
    points = [(fault.rank, fault.at) for fault in chosen]
    for number, place in enumerate(points):
        if place in points[:number]:
            raise ValueError(f"rank {place[0]} has two faults at {place[1]}; give each a point of its own")
    for rank in restarts:
        if not any(fault.rank == rank and (fault.is_deadly or fault.kind == "raises") for fault in chosen):
            raise ValueError(f"restart({rank}): no fault ends that rank; give it one, such as kill(rank={rank}, ...)")
    if within is not None and not (_is_number(within) and within > 0):
        raise ValueError(f"@faults(within={within!r}): give a number of seconds greater than 0")
    if isinstance(must_reach, str):
        raise ValueError(f"@faults(must_reach={must_reach!r}): give a list of names")
    return FaultPlan(chosen, restarts, within, tuple(must_reach))


def faults(*planned: Any, within: float | None = None, must_reach: Iterable[str] = ()) -> Callable[[T], T]:
    """Decorator: these faults happen while the test runs, and each must.

    `within`: survivors end so many seconds after a fault at the latest. `must_reach`: names that some rank must give
    to `reached`.
    """
    return _giving("@faults", plan_of(planned, within, must_reach))


def _giving(decorator: str, plan: FaultPlan | Sweep) -> Callable[[T], T]:
    def decorate(test: T) -> T:
        if isinstance(test, type):
            raise ValueError(f"{decorator} is for a test, and {test.__name__} is a class: decorate its methods")
        if hasattr(test, PLAN):
            raise ValueError(f"{decorator}: this test has faults already; give it all in one decorator")
        guarded: Any = test if inspect.iscoroutinefunction(test) else _guarded(test)
        setattr(guarded, PLAN, plan)
        return cast("T", guarded)

    return decorate


def _guarded(test: Any) -> Any:
    """The test, which fails where nobody has its faults happen."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        if fault_points.rank is None:
            bases = "MultiProcessTestCase, MultiProcContinuousTest, or @pytest.mark.world_size"
            raise RuntimeError(f"@faults: {test.__qualname__} does not run in ranks that can die: use {bases}")
        return test(*args, **kwargs)

    return run


# -- sweeps


@dataclass(frozen=True)
class Points:
    """All points of a kind, or of all kinds, that a rank passes while nothing is wrong."""

    where: str
    phase: str = "before"

    def of(self, passed: Mapping[str, int]) -> list[Point]:
        """The points of a rank that has passed all this so many times."""
        found = []
        for name, times in {"call": _number_of_calls(passed), **passed}.items():
            where, _, mark_name = name.partition(" ")
            if where in ("call", "step", "mark") and self.where in (where, "all"):
                found += [Point(where, n, name=mark_name, phase=self.phase) for n in range(1, times + 1)]
        return found


def calls(phase: str = "before") -> Points:
    """All collectives and messages of a rank."""
    return Points("call", call(1, phase=phase).phase)


def steps(phase: str = "before") -> Points:
    """All steps of optimizers of a rank."""
    return Points("step", step(1, phase=phase).phase)


@dataclass(frozen=True)
class KnownFailure:
    """A fault of a sweep that the test is known not to survive."""

    fault: PlannedFault
    reason: str


def known(fault: PlannedFault, reason: str) -> KnownFailure:
    """Let this fault of a sweep fail, such as `kill(1, at=call(3))`. It is still tried, and must not pass."""
    if not isinstance(fault, PlannedFault) or fault.rank is None or fault.at is None:
        raise ValueError("known() takes a fault with its rank and point: known(kill(1, at=call(3)), 'the reason')")
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"known({fault}): say why it fails")
    return KnownFailure(fault, reason)


@dataclass(frozen=True)
class Sweep:
    """Faults that are tried one by one, at each point of each of these ranks; without ranks, of all."""

    faults: tuple[PlannedFault, ...]
    at: Points
    ranks: tuple[int, ...] = ()
    within: float | None = None
    must_reach: tuple[str, ...] = ()
    known: tuple[KnownFailure, ...] = ()
    # What the runner has asked for; None for the sweep of a test.
    drill: Drill | None = None

    @property
    def recording(self) -> FaultPlan:
        """Nothing happens, so that the points are known."""
        return FaultPlan()

    def plans(self, passed: Mapping[int, Mapping[str, int]]) -> list[FaultPlan]:
        """One plan for each fault, rank and point. `passed`: what each rank has passed while nothing was wrong."""
        plans = []
        for fault in self.faults:
            for rank in self.ranks or sorted(passed):
                for at in self.at.of(passed.get(rank, {})):
                    plans.append(FaultPlan((replace(fault, rank=rank, at=at),), (), self.within, self.must_reach))
        return plans

    def why_known(self, fault: PlannedFault) -> str:
        """The reason for which this fault is known to fail, in a drill to hang; "" if it is not."""
        if self.drill is not None:
            return next((each.reason for each in self.drill.known if each.fault == fault), "")
        return next((each.reason for each in self.known if each.fault == fault), "")

    def is_wrong(self, cell: SweepCell) -> bool:
        """Does this fail the test? A drill fails only for hangs, and only if that is wanted."""
        if self.drill is None:
            return cell.end is not SweepEnd.NOT_TRIED and cell.end.is_pass == bool(cell.known)
        is_tried = cell.end not in (SweepEnd.NOT_TRIED, SweepEnd.ABSENT)
        return self.drill.fails and is_tried and (cell.end is SweepEnd.HUNG) != bool(cell.known)

    def why_not(self, world_size: int) -> str:
        """See FaultPlan."""
        chosen = [replace(fault, rank=rank) for fault in self.faults[:1] for rank in self.ranks]
        return FaultPlan((*chosen, *(each.fault for each in self.known))).why_not(world_size)


def _number_of_calls(passed: Mapping[str, int]) -> int:
    return sum(times for name, times in passed.items() if name in OPERATIONS)


def fault_sweep(
    *planned: Any,
    at: Points,
    ranks: Any = "all",
    within: float | None = None,
    must_reach: Iterable[str] = (),
    known: Iterable[KnownFailure] = (),
) -> Callable[[T], T]:
    """Decorator: run the test once as it is, and once for each of these faults, each rank and each of its points.

    `at`: `calls()` or `steps()`. `ranks`: numbers, or "all". The test passes if all runs do, but those that are
    `known` to fail.
    """
    made = [each() if callable(each) else each for each in planned]
    if not made or not all(isinstance(each, PlannedFault) and each.rank is None and each.at is None for each in made):
        raise ValueError("@fault_sweep takes faults without rank and point: @fault_sweep(kill, stop(2), at=calls())")
    if not isinstance(at, Points):
        raise ValueError(f"@fault_sweep(at={at!r}): give calls() or steps()")
    chosen = () if ranks == "all" else _checked_ranks(ranks, f"@fault_sweep(ranks={ranks!r})", '"all"')
    checked = plan_of([replace(each, rank=0, at=Point("call", 1)) for each in made[:1]], within, must_reach)
    excepted = tuple(known)
    for each in excepted:
        if not isinstance(each, KnownFailure):
            raise ValueError(f"@fault_sweep(known=[{each}]): give a reason: known({each}, 'the reason')")
        _check_is_tried(each.fault, made, at, chosen)
    return _giving("@fault_sweep", Sweep(tuple(made), at, chosen, within, checked.must_reach, excepted))


def _check_is_tried(fault: PlannedFault, among: list[PlannedFault], at: Points, ranks: tuple[int, ...]) -> None:
    """Raise ValueError if a sweep tries no such fault."""
    assert fault.at is not None
    of_sweep = Point(at.where, fault.at.n, phase=at.phase)
    if replace(fault, rank=None, at=None) not in among or fault.at != of_sweep or (ranks and fault.rank not in ranks):
        such = replace(among[0], rank=min(ranks, default=0), at=Point(at.where, 1, phase=at.phase))
        raise ValueError(f"known({fault}): the sweep tries no such fault, but faults such as {such}")


# -- what the faults of a sweep did, as data


class SweepEnd(enum.Enum):
    """The end of a test with one fault."""

    RECOVERED = "recovered"  # it passed, and a survivor had an error on its way
    UNNOTICED = "passed"  # it passed, and no call of a survivor has failed
    ERROR = "error"
    HUNG = "hung"  # ranks that had not failed had to be ended
    NOT_TRIED = "not tried"  # the call was over before the fault could happen in it
    ABSENT = "did not happen"  # the rank has not come to the point this time

    @property
    def is_pass(self) -> bool:
        return self in (SweepEnd.RECOVERED, SweepEnd.UNNOTICED)


@dataclass(frozen=True)
class SweepCell:
    """One run of a test with one fault."""

    fault: str  # whole: `kill(rank=1, at=call(2))`
    word: str  # without rank and point
    rank: int
    point: str
    place: str  # such as `at all_reduce #2`
    end: SweepEnd
    error: str = ""  # the type of the exception, or how the rank has ended
    seconds: float | None = None  # from the fault to that end
    title: str = ""  # of the failure
    known: str = ""  # the reason for which it is known


@dataclass(frozen=True)
class SweepReport:
    """All runs of a test with faults, or the reason why a drill has none."""

    cells: tuple[SweepCell, ...] = ()
    is_drill: bool = True
    why_not: str = ""
    missing: tuple[str, ...] = ()  # known cells of a drill that are no more: there is no such point
    names: tuple[str, ...] = ()  # given to `fault_point` and `reached` in the code
    reached: tuple[str, ...] = ()  # of these, in any run


# -- drills: sweeps that the runner asks for


@dataclass(frozen=True)
class KnownHang:
    """A fault that is known to hang a test. `test`: the name, which may lack the beginning, or have more of it."""

    test: str
    fault: PlannedFault
    reason: str

    def is_of(self, test: str) -> bool:
        """Is this the test that hangs?"""
        shorter, longer = sorted((_dotted(test), _dotted(self.test)), key=len)
        return f".{longer}".endswith(f".{shorter}")


@dataclass(frozen=True)
class Drill:
    """The faults that are tried at each point of each rank of every test, one run each."""

    faults: tuple[PlannedFault, ...]
    points: str = "call"
    within: float = 10.0
    # A hang fails its test.
    fails: bool = False
    known: tuple[KnownHang, ...] = ()

    def sweep(self, test: str) -> Sweep:
        """The sweep of a test with this name."""
        known = tuple(each for each in self.known if each.is_of(test))
        return Sweep(self.faults, Points(self.points), within=self.within, drill=replace(self, known=known))

    def missing(self, tried: Iterable[PlannedFault]) -> tuple[KnownHang, ...]:
        """The known cells that a drill should have tried, and has not: their points are no more."""
        tried = set(tried)
        return tuple(each for each in self.known if each.fault not in tried and self._tries(each.fault))

    def _tries(self, fault: PlannedFault) -> bool:
        """Is this a fault of the drill, at a point of its kind?"""
        is_at = fault.at is not None and self.points in ("all", fault.at.where)
        return is_at and replace(fault, rank=None, at=None) in self.faults


def _dotted(test: str) -> str:
    return test.replace(".py::", ".").replace("::", ".").replace("/", ".")


def _raised(name: str) -> PlannedFault:
    error = getattr(builtins, name, None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
        raise ValueError(f"raises:{name}: give an exception of Python, such as raises:OSError")
    try:
        return raises(error)
    except TypeError:
        raise ValueError(f"raises:{name}: it cannot be made without arguments; give another one") from None


# By name: what reads the part behind the colon, and its default.
_OF_WORDS: dict[str, tuple[Callable[[str], PlannedFault], str]] = {
    "kill": (lambda _: kill(), ""),
    "segv": (lambda _: segv(), ""),
    "abort": (lambda _: abort(), ""),
    "stop": (lambda text: stop(float(text) if text else None), ""),
    "slow": (lambda text: slow(float(text)), "1"),
    "hold_gil": (lambda text: hold_gil(float(text)), "1"),
    "exits": (lambda text: exits(int(text)), "1"),
    "raises": (_raised, "RuntimeError"),
}
KINDS = tuple(_OF_WORDS)


def fault_of_word(word: str) -> PlannedFault:
    """Read `kill`, `stop:2`, `slow:1`, `exits:3`, `raises:OSError`. Raises ValueError."""
    kind, colon, text = word.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a fault; known are {', '.join(KINDS)}")
    read, default = _OF_WORDS[kind]
    if colon and (not text or kind in _SIGNALS):
        raise ValueError(f"{word!r}: {'give a value behind the colon' if not text else f'{kind} has no value'}")
    try:
        return read(text or default)
    except ValueError as error:
        if "could not convert" in str(error) or "invalid literal" in str(error):
            raise ValueError(f"{word!r}: {text!r} is not a number") from None
        raise


_OF_POINTS: dict[str, Callable[..., Point]] = {"call": call, "step": step, "mark": mark}


def fault_of_text(text: str) -> PlannedFault:
    """Read a fault as drills report it: `kill(rank=1, at=call(2))`. Raises ValueError."""
    wrong = ValueError(f"{text!r} is not a fault as drills report it, such as kill(rank=1, at=call(2))")
    try:
        written = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise wrong from None
    match written:
        case ast.Call(ast.Name(kind), values, [ast.keyword("rank", rank), ast.keyword("at", ast.Call() as at)]):
            fault = fault_of_word(":".join([kind, *map(ast.unparse, values)]))
            return _fault(replace(fault, rank=_literal(rank), at=_point_of(at, wrong)))
    raise wrong


def _point_of(written: ast.Call, wrong: ValueError) -> Point:
    make = _OF_POINTS.get(ast.unparse(written.func))
    if make is None or written.keywords:
        raise wrong
    values = [_literal(each) for each in written.args]
    # Drills tell no operations or groups.
    if len(values) > (2 if make is mark else 1):
        raise wrong
    return make(*values)


def _literal(written: ast.expr) -> Any:
    """The value of a constant; that of another expression is its text, which is no number."""
    return written.value if isinstance(written, ast.Constant) else ast.unparse(written)


# -- for tests, in their ranks


def heal(rank: int) -> None:
    """In another rank: let a rank go on that a fault has stopped. Waits until the fault has happened."""
    if fault_points.rank is None:
        raise RuntimeError("heal() is for the ranks of a test with @faults")
    fault_points.rank.heal(rank)


def incarnation() -> int:
    """The number of processes of this rank that have died by faults of the test before."""
    return 0 if fault_points.rank is None else int(fault_points.rank.incarnation)
