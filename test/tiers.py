"""The three tiers of our tests, by what each test costs.

- `core`: at most CORE_SECONDS of CPU; and, for each mechanism that can only be seen end to end, one test that may cost
  more (`core_tests.py`)
- `slow`: the rows of `slow_tests.py`, with their reasons
- `full`: all others, at most FULL_SECONDS of CPU

`test_costs.tsv` has the seconds of CPU of every test, on the machine that recorded them, rounded to tenths. A test
without a record is in `core`, until it has one. `conftest.py` gives every test the mark of its tier.

What the tests of a class or module share, such as `setUpClass`, has a row of its own there. It counts in equal parts
for all of these tests, or as a cost of the one that `core_tests.py` lists. So the tier of a test does not depend on
which of them run, and in which order.

    python -m pytest --record-costs build/costs.tsv ...     measure what tests cost
    python test/tiers.py record build/costs.tsv             write that to test_costs.tsv; --whole: and nothing else
    python test/tiers.py check build/costs.tsv              fail if a test has outgrown its tier
    python test/tiers.py show                               the tiers and the costly tests of `core`

Seconds of CPU do not grow while a test waits for a core. But other work makes caches cold, and machines differ. So
`check` allows TOLERANCE times the bar, and more if most tests of the run cost more than their records say. It leaves
out a test that was the first of its process to import large packages, which says nothing about the test.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from core_tests import CORE
from cost_recorder import SHARED
from slow_tests import is_slow

TIERS = ("core", "full", "slow")
CORE_SECONDS = 1.0
FULL_SECONDS = 60.0
# One measurement of the same test was up to 2.8 times another, on a busy machine.
TOLERANCE = 4.0
COSTS = Path(__file__).with_name("test_costs.tsv")
# Another number is recorded only if it differs by more than both: the file then changes where tests have changed.
_NOISE_SHARE = 0.25
_NOISE_SECONDS = 0.2
# So many tests of that cost show whether a machine is slower.
_ENOUGH_TESTS = 10
_ENOUGH_SECONDS = 0.3


class Measured(NamedTuple):
    """What a run has measured of a test."""

    seconds: float
    outcome: str


def name_of(nodeid: str) -> str:
    """The name of a test in the files of the tiers: its id without the folder of all tests, on one line."""
    return nodeid.removeprefix("test/").replace("\n", "\\n").replace("\t", "\\t")


class Costs:
    """The seconds of tests, from the rows of `test_costs.tsv` or of a run."""

    def __init__(self, rows: Mapping[str, float]) -> None:
        self.rows = rows
        self._counts = Counter(row for name in rows if not is_shared(name) for row in shared_rows(name))
        # A test of core_tests.py runs in `core`, whatever it costs. What it shares with others costs nothing more then.
        self._payers = {row: name for name in _core_names() for row in shared_rows(name)}

    def of(self, name: str) -> float:
        """What a test costs: its own seconds, and its part of what it shares with others."""
        return self.rows.get(name, 0.0) + sum(self._part(name, row) for row in shared_rows(name))

    def _part(self, name: str, row: str) -> float:
        if row in self._payers:
            return self.rows.get(row, 0.0) if self._payers[row] == name else 0.0
        return self.rows.get(row, 0.0) / max(1, self._counts[row])

    @property
    def tests(self) -> list[str]:
        return [name for name in self.rows if not is_shared(name)]


def is_shared(name: str) -> bool:
    """Is this the row of what the tests of a class or module share?"""
    return name.endswith(f"::{SHARED}")


def shared_rows(name: str) -> list[str]:
    """The rows of what a test may share: of its module, and of its class."""
    owners = name.partition("[")[0].split("::")[:-1]
    return ["::".join([*owners[:number], SHARED]) for number in range(1, len(owners) + 1)]


def tier_of(nodeid: str, costs: Costs) -> str:
    name = name_of(nodeid)
    if name in _core_names():
        return "core"
    if is_slow(name):
        return "slow"
    return "core" if costs.of(name) <= CORE_SECONDS else "full"


@functools.cache
def _core_names() -> frozenset[str]:
    return frozenset(CORE.values())


def needless_rows(costs: Costs) -> list[str]:
    """The mechanisms of `core_tests.py` whose test would be in `core` anyway, and clearly so."""
    return [
        mechanism
        for mechanism, name in CORE.items()
        # 0.0 may be that of a test that was skipped on the machine that recorded it.
        if not is_slow(name) and costs.rows.get(name) and costs.of(name) <= CORE_SECONDS / 2
    ]


# -- files


def read_costs(file: Path = COSTS) -> Costs:
    """The recorded seconds of CPU."""
    if not file.exists():
        return Costs({})
    rows = (line.split("\t", 1) for line in file.read_text().splitlines() if line)
    return Costs({name: float(seconds) for seconds, name in rows})


def write_costs(rows: Mapping[str, float], file: Path = COSTS) -> None:
    """One line for each row, sorted by name, so that two changes rarely meet in one line."""
    file.write_text("".join(f"{rows[name]:.1f}\t{name}\n" for name in sorted(rows)))


def read_measured(files: Iterable[Path]) -> dict[str, Measured]:
    """What runs have measured. Of a test that ran more than once, the run that passed and cost least."""
    measured: dict[str, Measured] = {}
    for file in files:
        for line in file.read_text().splitlines():
            words = line.split("\t", 2)
            # A run that was killed may have written a part of its last line.
            if len(words) != 3 or "::" not in words[2]:
                continue
            name, result = name_of(words[2]), Measured(float(words[0]), words[1])
            before = measured.get(name)
            if before is None or (before.outcome != "passed", before.seconds) > (
                result.outcome != "passed",
                result.seconds,
            ):
                measured[name] = result
    return measured


# -- the record


def record(measured: Mapping[str, Measured], rows: Mapping[str, float], whole: bool = False) -> dict[str, float]:
    """The record after a run. `whole`: the run was of all tests, and only they stay.

    A test that failed, or was skipped, keeps what it cost when it passed; one that imported large packages does, too.
    """
    kept = {} if whole else {name: seconds for name, seconds in rows.items() if _file_exists(name)}
    for name, result in measured.items():
        before = rows.get(name)
        if result.outcome == "skipped":
            kept[name] = before or 0.0
        elif result.outcome == "failed":
            if before is not None:
                kept[name] = before
        elif before is None or (result.outcome == "passed" and _differs(result.seconds, before)):
            kept[name] = round(result.seconds, 1)
        else:
            kept[name] = before
    # Most classes and modules share nothing.
    return {name: seconds for name, seconds in kept.items() if seconds or not is_shared(name)}


def _differs(seconds: float, before: float) -> bool:
    return abs(seconds - before) > max(_NOISE_SECONDS, _NOISE_SHARE * before)


def _file_exists(name: str) -> bool:
    return Path(COSTS.parent, name.partition("::")[0]).exists()


# -- the check


class Outgrown(NamedTuple):
    """A test that costs more than its tier allows."""

    name: str
    seconds: float
    tier: str
    bar: float


def slowness(measured: Mapping[str, Measured], costs: Costs) -> float:
    """How much more most tests of a run cost than their records say: at least 1."""
    ratios = [
        result.seconds / costs.rows[name]
        for name, result in measured.items()
        if result.outcome == "passed" and costs.rows.get(name, 0.0) >= _ENOUGH_SECONDS
    ]
    return max(1.0, statistics.median(ratios)) if len(ratios) >= _ENOUGH_TESTS else 1.0


def outgrown(measured: Mapping[str, Measured], costs: Costs) -> list[Outgrown]:
    """The tests that cost clearly more than the bar of their tier, those above it by most first."""
    allowed = TOLERANCE * slowness(measured, costs)
    bars = {"core": CORE_SECONDS, "full": FULL_SECONDS}
    # A class or module shares its costs among all its tests, also those that this run left out.
    now = Costs({**costs.rows, **{name: result.seconds for name, result in measured.items()}})
    tests = []
    for name, result in measured.items():
        tier = tier_of(name, costs)
        bar = bars.get(tier)
        if bar is None or result.outcome != "passed" or is_shared(name) or name in _core_names():
            continue
        if now.of(name) > allowed * bar:
            tests.append(Outgrown(name, now.of(name), tier, bar))
    return sorted(tests, key=lambda test: -test.seconds / test.bar)


def _describe_check(measured: Mapping[str, Measured], costs: Costs) -> tuple[list[str], bool]:
    """What the check says of a run, and whether it fails."""
    lines = []
    new = sorted(name for name in measured if name not in costs.rows and not is_shared(name))
    if new:
        lines += [f"{len(new)} tests have no record of what they cost, and count as core until they have one:"]
        lines += [f"  {name}" for name in new[:20]]
        if len(new) > 20:
            lines.append(f"  and {len(new) - 20} more")
        lines.append("`python test/tiers.py record FILE` records them.")
    costly = outgrown(measured, costs)
    if costly:
        lines.append(f"{len(costly)} tests cost more seconds of CPU than their tier allows:")
        lines += [f"  {test.seconds:5.1f} s  {test.name}  ({test.tier}: at most {test.bar:g} s)" for test in costly]
    if any(test.tier == "core" for test in costly):
        names = shlex.join(f"test/{test.name}" for test in costly if test.tier == "core")
        lines += [
            "Make them cheaper, or file them again:",
            f"  python -m pytest --record-costs build/costs.tsv {names}",
            "  python test/tiers.py record build/costs.tsv",
        ]
    if any(test.tier == "full" for test in costly):
        lines.append("Make those of `full` cheaper, or give them a row and a reason in test/slow_tests.py.")
    return lines, bool(costly)


# -- the overview


def _describe(costs: Costs) -> list[str]:
    """The tests and seconds of each tier, and for each folder what its tests in `core` cost."""
    by_tier: dict[str, list[float]] = defaultdict(list)
    by_folder: dict[str, list[float]] = defaultdict(list)
    for name in costs.tests:
        tier, seconds = tier_of(name, costs), costs.of(name)
        by_tier[tier].append(seconds)
        if tier == "core":
            by_folder[name.partition("::")[0].rpartition("/")[0]].append(seconds)
    lines = [f"{tier}: {len(by_tier[tier])} tests, {sum(by_tier[tier]) / 60:.1f} minutes of CPU" for tier in TIERS]
    lines.append("core by folder:")
    for folder, folder_seconds in sorted(by_folder.items(), key=lambda row: -sum(row[1])):
        lines.append(f"  {sum(folder_seconds):6.1f} s  {len(folder_seconds):4} tests  {folder}")
    lines.append("rows of core_tests.py:")
    needless = needless_rows(costs)
    for mechanism, name in CORE.items():
        note = f"{costs.of(name):.1f} s" if name in costs.rows else "no record"
        if mechanism in needless:
            note += ", needs no row"
        lines.append(f"  {mechanism}: {name} ({note})")
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python test/tiers.py", description="The tiers of our tests, by what they cost."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write what a run has measured to test_costs.tsv")
    recording.add_argument("files", nargs="+", type=Path)
    recording.add_argument("--whole", action="store_true", help="the run was of all tests: forget all others")
    checking = commands.add_parser("check", help="fail if a test of a run costs more than its tier allows")
    checking.add_argument("files", nargs="+", type=Path)
    commands.add_parser("show", help="the tiers and what they cost")
    chosen = parser.parse_args(words)
    costs = read_costs()
    if chosen.command == "show":
        print("\n".join(_describe(costs)))
        return 0
    measured = read_measured(chosen.files)
    if chosen.command == "check":
        lines, fails = _describe_check(measured, costs)
        print("\n".join(lines or ["no test costs more than its tier allows"]))
        return 1 if fails else 0
    after = Costs(record(measured, costs.rows, chosen.whole))
    write_costs(after.rows)
    moved = [
        f"  {name}: {tier_of(name, costs)} -> {tier_of(name, after)}"
        for name in after.tests
        if name in costs.rows and tier_of(name, costs) != tier_of(name, after)
    ]
    print(
        f"{len(measured)} rows measured, {len(after.rows)} recorded in {COSTS.name}, {len(moved)} tests in another tier"
    )
    print("\n".join(moved), end="\n" if moved else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
