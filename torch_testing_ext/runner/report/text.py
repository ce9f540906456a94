"""Wording, number formats and elements of XML that all reports share."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator

from torch_testing_ext._machine.sharing import in_words
from torch_testing_ext._process.logs import cut_middle, without_colours

from ..events import RunBegan
from ..model import Attempt, FinishedTest, Lease, RunHeader, Summary, TestId, TestOutcome

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
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), lines)


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
    """Is more known of a failure than a text?"""
    return attempt.failure is not None and attempt.failure.text is None


def logs(attempt: Attempt) -> Iterator[tuple[str, str]]:
    """The output and stacks of all processes of an attempt, each with a heading."""
    if attempt.output:
        yield "the test's process", log(attempt.output)
    for one in attempt.ranks:
        if one.output:
            yield f"rank {one.rank}", log(one.output)
        if one.stacks:
            yield f"rank {one.rank}, stacks", log(one.stacks)


def title(attempt: Attempt) -> str:
    """The first line of what is known of an attempt, with a limited length."""
    return first_line(attempt.title)


def first_line(words: str) -> str:
    line = printable(words.strip()[: 2 * LONGEST_TITLE]).strip().partition("\n")[0]
    return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 3]}..."


def reason(attempt: Attempt) -> str:
    """The title of an attempt, for a line that names the test already."""
    return first_line(attempt.reason) if attempt.reason else title(attempt)


def duration(seconds: float) -> str:
    """A duration with a sensible unit, such as `9.86 s` or `2 min 05 s`."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def count(number: int, noun: str) -> str:
    """A number with a noun in singular or plural, such as `2 tests`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def skip_reasons(summary: Summary) -> list[tuple[str, int]]:
    """The reasons of skips and how often each occurs, the most frequent first."""
    skips = [one.last for one in summary.finished if one.outcome is TestOutcome.SKIPPED]
    return Counter(not_enough_devices(one.want) if one.want else title(one) for one in skips).most_common()


def not_enough_devices(want: str) -> str:
    """The reason of a skip. `want` is the number of devices that the test needs, such as "4 devices"."""
    return f"not enough devices: needs {want}"


def place(lease: Lease) -> str:
    """The devices of a unit or, if it has none, its CPU slots, in words."""
    on = f" on {lease.node}" if lease.node else ""
    if lease.devices:
        shared = f": {lease.shared_by} ranks on {count(len(lease.devices), 'GPU')} over {lease.over}"
        return f"gpu {', '.join(lease.devices)}{on}{shared if lease.shared_by else ''}"
    return f"cpu {', '.join(map(str, lease.slots))}{on}" if lease.slots else ""


def node_of(lease: Lease) -> str:
    """The node of a cluster that a unit ran on, as `node a`; empty on this machine."""
    return f"node {printable(lease.node)}" if lease.node else ""


def leftovers(attempt: Attempt) -> list[str]:
    """A line on the processes that a test has left running; none if its message names them, or if there are none."""
    names = "" if attempt.outcome is TestOutcome.LEAKED else "; ".join(map(printable, attempt.leftovers))
    return [f"left running (now terminated): {names}"] if names else []


def resources(run: RunBegan) -> list[str]:
    """The devices and slots of a run, such as `4 devices` and `8 CPU slots`."""
    devices = [count(len(run.devices), "fake device" if run.fake else "device")] if run.devices else []
    return [*devices, count(run.slots, "CPU slot")]


def memory(attempt: Attempt) -> str:
    """The most device memory that a test has had, such as `1.2 GiB of device memory`; empty if it has used none."""
    return f"{in_words(attempt.memory.reserved)} of device memory" if attempt.memory is not None else ""


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
        return "an error of the runner ended the run"
    return "the run was interrupted" if summary.interrupted else "the run stopped early"


def outcome_in_words(finished: FinishedTest) -> str:
    """The outcome of a test, with the number of attempts if there are several."""
    attempts = len(finished.attempts)
    if finished.last.outcome is TestOutcome.SKIPPED and attempts > 1:
        return f"{finished.outcome.value}, then skipped when retried"
    if finished.outcome is TestOutcome.FLAKY:
        return f"flaky: passed on the {ordinal(attempts)} attempt"
    return f"{finished.outcome.value} {attempts} times" if attempts > 1 else finished.outcome.value


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def header_facts(header: RunHeader) -> list[tuple[str, str]]:
    """The known facts about where a run took place, and with which software, each with its name."""
    changed = " (with uncommitted changes)" if header.uncommitted_changes else ""
    facts = [
        ("command", header.command),
        ("commit", f"{header.commit}{changed}" if header.commit else ""),
        ("host", header.host),
        ("torch", header.torch),
        ("Python", header.python),
        ("devices", header.devices),
    ]
    return [(name, value) for name, value in facts if value]


# -- elements of XML and HTML


def node(tag: str, *children: ET.Element | str | None, **attributes: object) -> ET.Element:
    """Creates an element whose text is printable. Example: node("p", "1 < 2", class_="x").

    Omits attributes that are None; `class_` stands for class, and `data_x` for data-x.
    """
    element = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), printable(str(value)))
    for child in children:
        if child is not None:
            _append(element, child)
    return element


def _append(element: ET.Element, child: ET.Element | str) -> None:
    if not isinstance(child, str):
        element.append(child)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + printable(child)
    else:
        element.text = (element.text or "") + printable(child)
