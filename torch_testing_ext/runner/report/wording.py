"""Wording and number formats that all reports share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch_testing_ext._process.logs import cut_middle, without_colours
from torch_testing_ext._process.words import count, size_in_words
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import RunBegan
from torch_testing_ext.runner.model import Attempt, FinishedTest, Lease, RunHeader, Summary, TestId

# Characters of one log in a file report. TORCH_TESTING_EXT_LOGS keeps complete logs.
LONGEST_LOG = 200_000
# Characters of a title: the first line of a message may be all of it.
LONGEST_TITLE = 500

_LINE_END = re.compile(r"\r\n?")
# Characters that XML 1.0 cannot represent, and control characters.
_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Makes text safe on a terminal and legal in XML: escapes other characters as Python literals do."""
    lines = _LINE_END.sub("\n", without_colours(text))
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), lines)


def log(text: str) -> str:
    """The output of a process, with a limited length."""
    return printable(cut_middle(text, LONGEST_LOG)).rstrip()


def message(attempt: Attempt) -> str:
    """All that is known of an attempt: the files of a run are the only place that has that."""
    return printable(attempt.said).rstrip()


def screen(attempt: Attempt) -> str:
    """The part of a failure that fits on a screen; all of it if only a text is known."""
    return printable(attempt.message if attempt.failure is None else attempt.failure.screen).rstrip()


def account(attempt: Attempt) -> str:
    """All that is known of a failure."""
    return printable(attempt.message if attempt.failure is None else attempt.failure.whole_account).rstrip()


def has_parts(attempt: Attempt) -> bool:
    """Whether more is known of a failure than a text."""
    return attempt.failure is not None and attempt.failure.text is None


def logs(attempt: Attempt) -> Iterator[tuple[str, str]]:
    """The output and stacks of all processes of an attempt, each with a heading."""
    if attempt.output:
        yield "the test's process", log(attempt.output)
    for rank_log in attempt.ranks:
        if rank_log.output:
            yield f"rank {rank_log.rank}", log(rank_log.output)
        if rank_log.stacks:
            yield f"rank {rank_log.rank}, stacks", log(rank_log.stacks)


def title(attempt: Attempt) -> str:
    """The first line of what is known of an attempt, with a limited length."""
    return first_line(attempt.title)


def first_line(words: str) -> str:
    """The first line of a text, with a limited length."""
    beginning = words.strip()[: 2 * LONGEST_TITLE]
    line = printable(beginning).strip().partition("\n")[0]
    if len(line) <= LONGEST_TITLE:
        return line
    return f"{line[: LONGEST_TITLE - 3]}..."


def reason(attempt: Attempt) -> str:
    """The title of an attempt, for a line that names the test already."""
    return first_line(attempt.reason) if attempt.reason else title(attempt)


def duration(seconds: float) -> str:
    """A duration with a sensible unit, such as `9.86 s` or `2 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02} s"
    return f"{hours} h {minutes:02} min"


def skip_reasons(summary: Summary) -> list[tuple[str, int]]:
    """The reasons of skips and how often each occurs, the most frequent first."""
    reasons: Counter[str] = Counter()
    for result in summary.finished:
        if result.outcome is not TestOutcome.SKIPPED:
            continue
        attempt = result.last
        reason = not_enough_devices(attempt.end.want) if attempt.end.want else title(attempt)
        reasons[reason] += 1
    return reasons.most_common()


def not_enough_devices(want: str) -> str:
    """The reason of a skip. `want` is the number of devices that the test needs, such as "4 devices"."""
    return f"not enough devices: needs {want}"


def place(lease: Lease) -> str:
    """The devices of a unit or, if it has none, its CPU slots, in words."""
    if lease.devices:
        words = f"gpu {', '.join(lease.devices)}"
    elif lease.slots:
        words = f"cpu {', '.join(map(str, lease.slots))}"
    else:
        return ""
    if lease.node:
        words += f" on {lease.node}"
    if lease.devices and lease.shared_by:
        words += f": {lease.shared_by} ranks on {count(len(lease.devices), 'GPU')} over {lease.over}"
    return words


def node_of(lease: Lease) -> str:
    """The node of a cluster that a unit ran on, as `node a`; empty on this machine."""
    return f"node {printable(lease.node)}" if lease.node else ""


def leftovers(attempt: Attempt) -> list[str]:
    """A line on the processes that a test has left running; none if its message names them, or if there are none."""
    if attempt.outcome is TestOutcome.LEAKED:
        return []
    names = "; ".join(printable(process) for process in attempt.end.leftovers)
    return [f"left running (now terminated): {names}"] if names else []


def resources(run: RunBegan) -> list[str]:
    """The devices and slots of a run, such as `4 devices` and `8 CPU slots`."""
    slots = count(run.slots, "CPU slot")
    if not run.devices:
        return [slots]
    device = "fake device" if run.fake else "device"
    return [count(len(run.devices), device), slots]


def memory(attempt: Attempt) -> str:
    """The most device memory that a test has had, such as `1.2 GiB of device memory`; empty if it has used none."""
    if attempt.end.memory is None:
        return ""
    return f"{size_in_words(attempt.end.memory.reserved)} of device memory"


def name(attempt: Attempt, repetitions: int = 1) -> str:
    """The full name of a test, with the number of the repetition if it is repeated."""
    return test_name(attempt.test.id) + repetition(attempt, repetitions)


def one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n")


def test_name(test: TestId) -> str:
    """The full name of a test on one line."""
    return one_line(str(test))


test_name.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def repetition(attempt: Attempt, repetitions: int) -> str:
    """` [2]` for the second repetition of a repeated test, otherwise empty."""
    repeated = repetitions > 1 or attempt.repetition > 0
    return f" [{attempt.repetition + 1}]" if repeated else ""


def why_unfinished(summary: Summary) -> str:
    if summary.error:
        return "an internal error ended the run"
    return "the run was interrupted" if summary.interrupted else "the run stopped early"


def outcome_in_words(finished: FinishedTest) -> str:
    """The outcome of a test, with the number of attempts if there are several."""
    attempts = len(finished.attempts)
    outcome = str(finished.outcome.value)
    if attempts > 1 and finished.last.outcome is TestOutcome.SKIPPED:
        return f"{outcome}, then skipped when retried"
    if finished.outcome is TestOutcome.FLAKY:
        return f"flaky: passed on the {ordinal(attempts)} attempt"
    if attempts > 1:
        return f"{outcome} {attempts} times"
    return outcome


def ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 in (11, 12, 13)
    ending = "th" if is_teen else endings.get(number % 10, "th")
    return f"{number}{ending}"


def header_facts(header: RunHeader) -> list[tuple[str, str]]:
    """The known facts about where a run took place, and with which software, each with its name."""
    commit = header.commit
    if commit and header.uncommitted_changes:
        commit += " (with uncommitted changes)"
    facts = [
        ("command", header.command),
        ("commit", commit),
        ("host", header.host),
        ("torch", header.torch),
        ("Python", header.python),
        ("devices", header.devices),
        *header.facts.items(),
    ]
    return [(name, value) for name, value in facts if value]
