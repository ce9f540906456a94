"""The census: the tests that exist and were not seen running in any results, each with the reason."""

from __future__ import annotations

import enum
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import PurePosixPath

from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import OmittedTest, TestId

from .ci_jobs import CiJobs
from .definitions import DefinedFile, DefinedTest
from .known_holes import KnownHole
from .matching import Matcher
from .results import RunResults, TestResult, name_of


class HoleReason(enum.Enum):
    """The reason why a test was not seen running; the first that fits counts."""

    MADE_UP = "only on fake devices or as a world"
    NOT_JUDGED = "not judged"
    RETRIES = "only after retries"
    NEED = "a need that no machine had"
    BY_HAND = "skipped by hand"
    AT_IMPORT = "skipped at import"
    NOT_SELECTED = "collected, never selected"
    RENAMED = "renamed since it ran"
    UNKNOWN = "unknown"
    NEVER_COLLECTED = "never collected"


@dataclass(frozen=True)
class Hole:
    """A test that was not seen running."""

    test: str
    file: str
    line: int
    reason: HoleReason
    detail: str
    # The line of the list of known holes that has it, and whether its day is over.
    known: KnownHole | None = None
    is_expired: bool = False

    @property
    def is_new(self) -> bool:
        return self.known is None or self.is_expired

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.file).parent)


@dataclass(frozen=True)
class Census:
    """The answer of the census."""

    tests: int
    runs: int
    machines: tuple[str, ...]
    holes: tuple[Hole, ...]
    # RunResults that are of no test in the source.
    strangers: tuple[str, ...] = ()
    # Known holes that are none any more.
    mended: tuple[KnownHole, ...] = ()
    warnings: tuple[str, ...] = ()
    # Places that the configuration of CI names and that do not exist, each in words.
    dead_places: tuple[str, ...] = ()

    @property
    def new_holes(self) -> int:
        return sum(hole.is_new for hole in self.holes)

    def by_reason(self) -> Counter[str]:
        return Counter(hole.reason.value for hole in self.holes)

    def by_folder(self) -> Counter[str]:
        return Counter(hole.folder for hole in self.holes)


@dataclass
class _Evidence:
    """All that is known of a test, or of one of its parameters."""

    results: list[TestResult] = field(default_factory=list)
    left_out: list[OmittedTest] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    is_collected: bool = False


_Key = tuple[TestId, int]
_NEED = re.compile(
    r"\b(needs?|requires?|required|at least|not available|unavailable|insufficient|only \d+)\b.*"
    r"\b(gpus?|cuda|devices?|accelerators?|nccl|xpu|rocm|hip|ranks?|world.?size|nodes?|mem(ory)?)\b"
    r"|\b(gpus?|cuda|devices?|accelerators?|nccl|xpu|rocm|hip|world.?size|nodes?)\b.*"
    r"\b(needed|required|requires?|not available|unavailable|is needed|not found|missing)\b",
    re.IGNORECASE,
)


def take_census(
    files: Sequence[DefinedFile],
    all_results: Sequence[RunResults],
    *,
    collected: Sequence[TestId] = (),
    known: Sequence[KnownHole] = (),
    today: date | None = None,
    torn: Sequence[str] = (),
    jobs: CiJobs | None = None,
) -> Census:
    """The census of these files. `collected`: tests that a collection has listed. `torn`: results that are lost.

    Without any results, it has the tests that the source and the jobs keep from running.
    """
    jobs = jobs or CiJobs()
    warnings = [f"{name} is torn: what ran there is not known" for name in torn]
    named = frozenset(file.file for file in files if jobs.names(file.file))
    tested = {file.file for file in files if file.tests and not file.why_never}
    if len(named & tested) < len(tested) / 2:
        warnings.append(
            f"the configuration of CI names {len(named & tested)} of {count(len(tested), 'file')} with tests itself: "
            "something that it calls runs the others, so no file counts as one that it does not name"
        )
        named |= tested
    taken = _Taking(files, all_results, torn, jobs, named)
    taken.add_collected(collected)
    holes = sorted(taken.holes(), key=lambda hole: (hole.file, hole.line, hole.test))
    day = today or date.today()
    marked = []
    for hole in holes:
        entry = next((each for each in known if each.is_of(hole.test)), None)
        marked.append(replace(hole, known=entry, is_expired=entry is not None and entry.until < day))
    return Census(
        taken.number,
        len(all_results),
        tuple(dict.fromkeys(each.machine for each in all_results if each.machine)),
        tuple(marked),
        tuple(taken.strangers),
        tuple(each for each in known if not any(each.is_of(hole.test) for hole in holes)),
        tuple(warnings),
        jobs.dead,
    )


class _Taking:
    """Puts the results beside the definitions."""

    def __init__(
        self,
        files: Sequence[DefinedFile],
        all_results: Sequence[RunResults],
        torn: Sequence[str],
        jobs: CiJobs,
        named: frozenset[str],
    ):
        self.strangers: list[str] = []
        self.number = 0
        self._files = files
        self._torn = torn
        self._jobs = jobs
        self._named = named
        self._has_results = bool(all_results)
        self._matcher = Matcher(files)
        self._evidence: dict[_Key, dict[str, _Evidence]] = defaultdict(lambda: defaultdict(_Evidence))
        self._of_files: dict[str, _Evidence] = defaultdict(_Evidence)
        self._ambiguous: dict[_Key, int] = Counter()
        # Bodies of tests that are gone, with their names.
        self._gone: dict[str, str] = {}
        self._missing = _missing_shards(all_results)
        for results in all_results:
            self._add(results)
        self._touched = {key[0].file for key, by_name in self._evidence.items() if by_name}
        self._touched |= set(self._of_files)
        self._folders = {str(PurePosixPath(file).parent) for file in self._touched}

    def _add(self, results: RunResults) -> None:
        for result in results.results:
            file = self._matcher.file_of(result.test, results.is_foreign)
            if file is not None:
                self._of_files[file].results.append(result)
                continue
            if results.is_foreign and not result.test.method:
                for one in self._matcher.of_class(result.test):
                    self._evidence[one.id, one.line][""].results.append(result)
                continue
            found = self._matcher.matches(result.test, results.is_foreign)
            self._record(found, result.test, results).results.append(result)
        for each in results.left_out:
            if each.test.method:
                self._record(self._matcher.matches(each.test, False), each.test, results).left_out.append(each)
            else:
                self._of_files[each.test.file].left_out.append(each)
        for test in results.unfinished:
            evidence = self._record(self._matcher.matches(test, False), test, results)
            evidence.stopped.append(results.why_unfinished or "its run was killed")

    def _record(self, found: Sequence[DefinedTest], test: TestId, results: RunResults) -> _Evidence:
        """The place for what is known of a test."""
        if len(found) == 1:
            (one,) = found
            return self._evidence[one.id, one.line][test.method.removeprefix(one.id.method)]
        if found:
            for one in found:
                self._ambiguous[one.id, one.line] += 1
        else:
            name = name_of(test)
            self.strangers.append(name)
            base = TestId(test.file, test.cls, test.method.partition("[")[0])
            if body := results.bodies.get(str(base)):
                self._gone[body] = str(base)
        return _Evidence()

    def add_collected(self, collected: Sequence[TestId]) -> None:
        for test in collected:
            self._touched.add(test.file)
            for one in self._matcher.matches(test, False):
                self._evidence[one.id, one.line][test.method.removeprefix(one.id.method)].is_collected = True

    def holes(self) -> Iterator[Hole]:
        for file in self._files:
            for test in file.tests:
                evidence = self._evidence.get((test.id, test.line), {})
                if not evidence and self._matcher.has_no_tests(test.id):
                    continue
                names = [name for name in evidence if name]
                if test.is_parametrized or names:
                    names = list(dict.fromkeys([*names, *test.parameters]))
                own = evidence.get("", _Evidence())
                self.number += len(names) or 1
                if not names:
                    yield from self._hole(file, test, "", own)
                elif own.results and len(evidence) == 1:
                    # Only results without parameters.
                    yield from self._hole(file, test, "", own)
                else:
                    for name in names:
                        yield from self._hole(file, test, name, evidence.get(name, _Evidence()))

    def _hole(self, file: DefinedFile, test: DefinedTest, name: str, evidence: _Evidence) -> Iterator[Hole]:
        why = self._why(file, test, name, evidence)
        if why is not None:
            reason, detail = why
            yield Hole(f"{test.id}{name}", file.file, test.line, reason, detail)

    def _why(
        self, file: DefinedFile, test: DefinedTest, name: str, evidence: _Evidence
    ) -> tuple[HoleReason, str] | None:
        """The reason of a hole; None if the test was seen."""
        seen = [result for result in evidence.results if result.was_seen]
        if seen:
            if test.is_parametrized and not name:
                ran = f"{count(len(seen), 'result')} without parameters"
                return HoleReason.UNKNOWN, f"{ran}: which of them ran is not known"
            if all(result.outcome is TestOutcome.FLAKY for result in seen):
                return HoleReason.RETRIES, f"passed only on a retry, in {count(len(seen), 'run')}"
            return None
        for result in evidence.results:
            if result.made_up:
                return HoleReason.MADE_UP, result.made_up
        for result in evidence.results:
            if result.not_judged:
                return HoleReason.NOT_JUDGED, result.not_judged
        if evidence.results:
            return self._why_skipped(file, test, evidence.results)
        of_file = self._of_files.get(file.file, _Evidence())
        for result in of_file.results:
            if result.outcome is TestOutcome.SKIPPED:
                line = f"{file.file}:{file.import_skip}: " if file.import_skip else ""
                return HoleReason.AT_IMPORT, f"{line}{result.message}"
            if result.outcome is TestOutcome.ERROR:
                return HoleReason.NEVER_COLLECTED, f"its file cannot be imported: {result.message}"
        if of_file.results:
            return HoleReason.UNKNOWN, "only a result of the whole file: which of its tests ran is not known"
        left_out = [*evidence.left_out, *of_file.left_out]
        if left_out or evidence.stopped:
            return HoleReason.NOT_SELECTED, self._why_left_out(left_out, evidence.stopped)
        return self._why_nowhere(file, test, name, evidence)

    def _why_nowhere(
        self, file: DefinedFile, test: DefinedTest, name: str, evidence: _Evidence
    ) -> tuple[HoleReason, str] | None:
        """The reason of a test that no results have."""
        why_never = file.why_never or test.why_never or self._matcher.why_never(test.id)
        if why_never and not evidence.is_collected:
            return HoleReason.NEVER_COLLECTED, why_never
        if ambiguous := self._ambiguous.get((test.id, test.line)):
            results = count(ambiguous, "result")
            return HoleReason.UNKNOWN, f"{results} may be of this test or of another one of the same name"
        old = self._gone.get(test.body)
        if old is not None and not name:
            return HoleReason.RENAMED, f"ran as {old}; no results have the new name"
        if evidence.is_collected:
            return HoleReason.NOT_SELECTED, "a collection lists it, and no results have it"
        if file.file in self._touched:
            what = "parameters" if name else "tests of its file"
            return HoleReason.NOT_SELECTED, f"no results have it, though they have other {what}"
        return self._why_untouched(file)

    def _why_untouched(self, file: DefinedFile) -> tuple[HoleReason, str] | None:
        """The reason of a test in a file that no results know."""
        is_named = file.file in self._named
        if not self._has_results:
            return None if is_named else (HoleReason.NEVER_COLLECTED, "no command of CI names its file")
        detail = "no results have a test of this file"
        folder = str(PurePosixPath(file.file).parent)
        if folder not in self._folders:
            detail += f", nor of its folder {folder}"
        if not is_named:
            detail += "; no command of CI names it"
        elif not self._jobs.commands and len(self._jobs.dead) == 1:
            detail += f"; {self._jobs.dead[0]}, which does not exist"
        return HoleReason.NEVER_COLLECTED, detail

    def _why_skipped(
        self, file: DefinedFile, test: DefinedTest, results: Sequence[TestResult]
    ) -> tuple[HoleReason, str]:
        wants = list(dict.fromkeys(result.want for result in results if result.want))
        said = next((result.message for result in results if result.message), "no reason is known")
        if wants:
            return HoleReason.NEED, f"needs {' or '.join(wants)}"
        line = next(iter(test.skips), 0) or test.skip_mark
        place = next(filter(None, (self._place(result.skipped_at) for result in results)), None)
        if place is None or (line and self._is_at(test, place)):
            place = file.file, line or test.line
        # A mark or decorator from elsewhere skips at the test itself, and says what it needs.
        if not line and self._is_at(test, place) and _NEED.search(said):
            return HoleReason.NEED, said
        return HoleReason.BY_HAND, f"{place[0]}:{place[1]}: {said}"

    def _place(self, skipped_at: str) -> tuple[str, int] | None:
        """A line of this project, from a path that another machine may have; None if it is elsewhere."""
        path, _, number = skipped_at.rpartition(":")
        file = self._matcher.place(path) if path else None
        return (file, int(number)) if file is not None else None

    @staticmethod
    def _is_at(test: DefinedTest, place: tuple[str, int]) -> bool:
        return place[0] == test.id.file and test.first_line <= place[1] <= test.line

    def _why_left_out(self, left_out: Sequence[OmittedTest], stopped: Sequence[str]) -> str:
        reasons = list(dict.fromkeys(each.why for each in left_out))
        of_shards = [why for why in reasons if why.startswith("--shard")]
        words = [why for why in reasons if why not in of_shards]
        if of_shards and not words:
            lost = [f"shard {shard} is not among the results" for shard in self._missing]
            words = [*lost, *(f"{name} is torn" for name in self._torn)]
            words = words or ["no shard has run it: they have split the tests differently"]
        words += [f"its run stopped first: {why}" for why in dict.fromkeys(stopped)]
        return "; ".join(words)


def _missing_shards(all_results: Sequence[RunResults]) -> list[str]:
    """The shards, such as 3/3, that results speak of and that are not there."""
    there: dict[str, set[str]] = defaultdict(set)
    missing = [shard for results in all_results for shard in results.missing]
    for results in all_results:
        index, _, number = results.shard.partition("/")
        if number:
            there[number].add(index)
    for number, indices in there.items():
        missing += [f"{index}/{number}" for index in range(1, int(number) + 1) if str(index) not in indices]
    return list(dict.fromkeys(missing))


def grouped_holes(census: Census) -> Mapping[str, Sequence[Hole]]:
    """The holes by reason, the most frequent first."""
    by_reason: dict[str, list[Hole]] = {reason: [] for reason, _ in census.by_reason().most_common()}
    for hole in census.holes:
        by_reason[hole.reason.value].append(hole)
    return by_reason
