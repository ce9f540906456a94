"""The faults of a test, by its decorator or by the run: which hosts can have them, and how they reach the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, words
from torch_testing_ext._process.setting_readers import read_path, read_seconds
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan, Sweep
    from torch_testing_ext.launch.attempts import Host, RankAttempt, TestPlan
    from torch_testing_ext.launch.rank_reports import RankReport
    from torch_testing_ext.launch.verdict import Verdict


def _known_faults() -> str:
    from torch_testing_ext.faults import KINDS

    return f"try faults at every call of tests: {', '.join(KINDS)}"


def _read_faults(text: str) -> str:
    """Faults without rank and point, as `@fault_sweep` takes them: `kill, stop(2)`."""
    from torch_testing_ext.faults import faults_of_text

    faults = faults_of_text(text)
    for fault in faults:
        if fault.rank is not None or fault.at is not None:
            raise ValueError(f"{fault}: leave out rank and point: all are tried")
    return ", ".join(dict.fromkeys(map(str, faults)))


def _decoded_sweep(text: str) -> Sweep:
    import json

    from torch_testing_ext._process import messages
    from torch_testing_ext.faults import Sweep

    sweep: Sweep = messages.decode(Sweep, json.loads(text))
    return sweep


def _kind_of_known() -> Any:
    from torch_testing_ext.launch.known_hangs import KnownFile

    return KnownFile | None


# The runner tries faults in each test.
SWEEP: Setting[Sweep | None] = Setting("_TORCH_TESTING_EXT_SWEEP", "a sweep", _decoded_sweep, None)
_STOPS = "a test that stops has no time limit. Leave out one of them"
_FAULTS = Option(
    "sweep",
    "faults",
    _read_faults,
    _known_faults,
    "FAULT[(VALUE)],...",
    kind=str | None,
    apart={"pdb": _STOPS, "trace": _STOPS},
    level=Level.HELP_ALL,
)
_POINTS = Option(
    "sweep_points",
    "faults",
    words("calls", "steps", "all"),
    "where to inject faults",
    "calls|steps|all",
    kind=str,
    default="calls",
    level=Level.SETTING,
    needs="sweep",
)
_WITHIN = Option(
    "sweep_within",
    "faults",
    read_seconds,
    "seconds after which a rank still running counts as hung",
    "SECONDS",
    kind=float,
    default=10.0,
    level=Level.SETTING,
    needs="sweep",
)
_FAIL = Option(
    "sweep_fail",
    "faults",
    words("nothing", "hang"),
    "results that fail the test",
    "nothing|hang",
    kind=str,
    default="nothing",
    level=Level.SETTING,
    needs="sweep",
)
_KNOWN: Option[Any] = Option(
    "sweep_known",
    "faults",
    read_path,
    "a TOML file of known hangs",
    "FILE",
    kind=_kind_of_known,
    level=Level.SETTING,
    needs="sweep",
)


# Why a test is in no sweep of the run.
_OWN_FAULTS = "it has faults of its own"
_ONE_RANK = "it has one rank, and nobody survives that"
_JUDGES_ITSELF = "its class judges exit codes itself, by _check_return_codes"
# In seconds: a test of a sweep runs many times, each of which has the limit of the test.
_LONGEST = 86_400.0


class Faults(Aspect):
    """Has the faults of a test happen in its ranks."""

    name = "faults"
    gaps = MappingProxyType(
        {
            HostKind.THREADS: "its ranks are threads, of which none can die alone: use MultiProcessTestCase",
            HostKind.OWN: "its class starts its ranks itself: remove its _start_processes",
            HostKind.LAUNCHED: "a launcher has started the ranks, and ends all with one: run the test without it",
            HostKind.WORLD: "has faults, of which ranks without communication learn nothing",
        }
    )
    options = (_FAULTS, _POINTS, _WITHIN, _FAIL, _KNOWN)
    settings = (SWEEP,)

    def implied(self, asked: AskedOptions) -> Mapping[str, Any]:
        file = asked.value(_KNOWN)
        if asked.value(_FAULTS) is None or file is None:
            return {}
        from torch_testing_ext.launch.known_hangs import read_known_hangs

        return {_KNOWN.field: read_known_hangs(file)}

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        chosen = asked.value(_FAULTS)
        if chosen is None:
            return {}
        import json

        from torch_testing_ext._process import messages
        from torch_testing_ext.faults import Points, Sweep, Wrong, faults_of_text

        known = asked.value(_KNOWN)
        sweep = Sweep(
            faults_of_text(chosen),
            Points(asked.value(_POINTS).removesuffix("s")),
            within=asked.value(_WITHIN),
            known=() if known is None else known.hangs,
            wrong=Wrong.HANGS if asked.value(_FAIL) == "hang" else Wrong.NOTHING,
        )
        return {SWEEP.name: json.dumps(messages.encode(sweep))}

    def longest(self, asked: AskedOptions) -> float | None:
        return None if asked.value(_FAULTS) is None else _LONGEST

    def remarks(self, asked: AskedOptions, tests: Sequence[str]) -> Sequence[str]:
        """Say which of the known tests are not in the run."""
        known = asked.value(_KNOWN)
        strangers: Sequence[str] = () if known is None else known.strangers(tests)
        return strangers

    def why_not(self, plan: FaultPlan | Sweep, kind: HostKind, world_size: int) -> str:
        """Why ranks of this kind cannot have these faults; "" if they can."""
        from torch_testing_ext.faults import FaultPlan

        why = self.gaps.get(kind) or plan.why_not(world_size)
        if not why and isinstance(plan, FaultPlan) and plan.restarts and kind is HostKind.KEPT:
            why = (
                f"restart({plan.restarts[0]}) needs ranks of its own for each test: use MultiProcessTestCase, or the "
                "scope 'function' of the mark"
            )
        return why

    def check(self, host: Host, plan: TestPlan) -> TestPlan:
        """Refuse faults of the test that its ranks cannot have; else try those of the run, if that tries any."""
        if plan.faults is not None:
            why = self.why_not(plan.faults, host.kind, plan.world_size)
            _say_not_swept(why or _OWN_FAULTS)
            if why:
                raise host.refusal(f"@faults of {plan.case.name}", why)
            return plan
        sweep = SWEEP.value()
        if sweep is None or not plan.is_whole_test:
            return plan
        why = self.gaps.get(host.kind) or (_JUDGES_ITSELF if plan.judges_itself else "")
        why = why or (_ONE_RANK if plan.world_size == 1 else "")
        if why:
            _say_not_swept(why)
            return plan
        from dataclasses import replace

        return replace(plan, faults=sweep.of_test(plan.case.name))

    def prepare(self, attempt: RankAttempt) -> None:
        from torch_testing_ext.faults import Sweep

        chosen = attempt.plan.faults
        if attempt.variation is not None:
            chosen = attempt.variation
        elif isinstance(chosen, Sweep):
            chosen = chosen.recording
        attempt.sanitize = attempt.sanitize.with_faults(chosen)
        # A sweep of the run has hundreds.
        attempt.keeps_files = attempt.is_first or SWEEP.value() is None

    def runs(self, plan: TestPlan, run: Callable[[Any], tuple[Sequence[RankReport], Verdict]]) -> Verdict | None:
        from torch_testing_ext.faults import Sweep

        sweep = plan.faults
        if not isinstance(sweep, Sweep):
            return None
        from torch_testing_ext.launch.sweeps import sweep_verdict

        # It begins with a run as it is.
        return sweep_verdict(sweep, lambda faults: run(None if faults == sweep.recording else faults))


FAULTS = Faults()


def plan_on(target: Any) -> FaultPlan | Sweep | None:
    """Return what `@faults` or `@fault_sweep` has given to this function or method; None without one."""
    from torch_testing_ext.faults import PLAN

    plan: FaultPlan | Sweep | None = getattr(target, PLAN, None)
    return plan


def _say_not_swept(why: str) -> None:
    """Tell the runner why a test is not in the sweep of the run, if there is one."""
    if SWEEP.value() is not None:
        from torch_testing_ext._tests import notes
        from torch_testing_ext._tests.sweep_reports import SweepReport

        notes.note_sweep(SweepReport(why_not=why))
