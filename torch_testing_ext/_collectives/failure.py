"""A failure of a test as data, and its text on a screen."""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.logs import cut, cut_middle, width, without_colours
from torch_testing_ext._process.words import list_of

WIDTH = 80
# The lines of a failure at that width. The two that a runner adds, with the name of the test, make 15.
MOST_SCREEN_LINES = 13
# Lines before one that is at fault.
MOST_CONTEXT = 2
MOST_SITES = 2
MOST_PRINTED = 3
_MOST_GROUPS = 4
_LONGEST_TITLE = 3 * WIDTH
_LONGEST_DOING, _SHORTEST_DOING = 46, 24
_WIDEST_RANKS = 20
# The operation with which a call begins, and behind dots a number with its name, a shape, or another word.
_OPERATION = re.compile(r"^(?:in |after )?\S*(?: \.\.\. (?:\w+ \d+|\[[^]]*\]|\S+))?")
# The line between a failure on one screen and its account, in one text.
WHOLE_ACCOUNT = "\n\n-- full report --\n"


class Detail(NamedTuple):
    """The limits of what a screen shows of a failure."""

    # Lines before each that is at fault.
    context: int
    sites: int
    values: int
    # Lines that the culprit has printed.
    printed: int


# The limits from all that there is to the least that helps.
_DETAILS = (
    Detail(MOST_CONTEXT, MOST_SITES, 5, MOST_PRINTED),
    Detail(1, 2, 5, 3),
    Detail(1, 2, 5, 1),
    Detail(0, 2, 4, 1),
    Detail(0, 1, 3, 1),
    Detail(0, 1, 1, 0),
    Detail(0, 0, 0, 0),
)

_OF_PAGE = Detail(MOST_CONTEXT, MOST_SITES, 200, MOST_PRINTED)


class LineKind(enum.Enum):
    """The kind of a line, for its colour."""

    TITLE = "title"
    # A line of the source that is at fault.
    FAULT = "fault"
    GOT = "got"
    EXPECTED = "expected"
    COMMAND = "command"
    OTHER = "other"


# torch, unittest and pytest write these, in the message of an assertion.
_GOT = re.compile(r" *(Got: |- |Expected .* but got )")
_EXPECTED = re.compile(r" *(Expected: |\+ )")


def kind_of_value(line: str) -> LineKind:
    """The kind of a line of an assertion's message, for its colour."""
    if _GOT.match(line):
        return LineKind.GOT
    return LineKind.EXPECTED if _EXPECTED.match(line) else LineKind.OTHER


class Line(NamedTuple):
    """A line of a text that shows a failure."""

    text: str
    kind: LineKind = LineKind.OTHER


@dataclass(frozen=True)
class RankRow:
    """Ranks, with what they did, and where. A test without ranks has only where."""

    ranks: tuple[int, ...]
    did: str
    site: Site | None
    # The same in fewer words, where there are some.
    brief: str = ""


@dataclass(frozen=True)
class SourceLine:
    """A line of the source, with its number."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class CodeLine:
    """A line of the source as a screen shows it: without the indentation that all lines have in common."""

    number: int
    text: str
    is_at_fault: bool


@dataclass(frozen=True)
class Value:
    """A further line of what an exception says, such as the expected value of an assertion."""

    text: str
    kind: LineKind = LineKind.OTHER


@dataclass(frozen=True)
class RankWait:
    """Ranks that wait for others in a call."""

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    call: str
    site: Site | None


class Cell(NamedTuple):
    """A row of the table of ranks in words."""

    ranks: str
    did: str
    site: Site | None
    brief: str = ""

    def did_in(self, columns: int) -> str:
        """The acts of the ranks, in at most so many columns."""
        return self.did if width(self.did) <= columns else cut(self.brief or self.did, columns)

    @property
    def least(self) -> int:
        """The columns for what is never cut: the operation with what tells it apart, and the start of a sentence."""
        operation = "".join(_OPERATION.findall(self.brief or self.did)[:1])
        return min(width(self.did), max(width(operation) + len("..."), _SHORTEST_DOING))


@dataclass(frozen=True)
class ScreenParts:
    """The parts of a failure that one screen shows."""

    title: str
    table: list[Cell]
    code: list[CodeLine]
    # What the exception says, and what was printed.
    values: list[Value]
    remarks: list[str]
    show_command: str
    rerun_command: str
    # Texts of several lines, below all others.
    notes: list[str]

    def lines(self) -> Iterator[Line]:
        yield Line(self.title, LineKind.TITLE)
        yield from map(Line, _aligned(self.table))
        if self.code or self.values:
            yield Line("")
        for line in self.code:
            text = cut(f"  {'>' if line.is_at_fault else ' '} {line.number:>5} | {line.text}".rstrip(), WIDTH)
            yield Line(text, LineKind.FAULT if line.is_at_fault else LineKind.OTHER)
        yield from (Line(cut(f"  {value.text}", WIDTH), value.kind) for value in self.values)
        named = (("details", self.show_command), ("run again", self.rerun_command))
        commands = [Line(f"{f'{what}:':10}  {command}", LineKind.COMMAND) for what, command in named if command]
        if self.remarks or commands:
            yield Line("")
        yield from map(Line, self.remarks)
        yield from commands
        for note in self.notes:
            yield Line("")
            yield from map(Line, note.split("\n"))


@dataclass(frozen=True)
class FailureView:
    """One failure of a test. A failure of which only a text is known has that as its `text`, and no other parts."""

    title: str
    # Begins the title: the fixture, if it failed there.
    within: str = ""
    # The culprits first.
    rows: tuple[RankRow, ...] = ()
    # Where it failed: the lines to show, the most important first.
    sites: tuple[Site, ...] = ()
    # The lines of these sites, and the lines before them.
    source: tuple[SourceLine, ...] = ()
    values: tuple[Value, ...] = ()
    # The last lines that the culprit has printed.
    printed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    waits: tuple[RankWait, ...] = ()
    # Further failures of the same test, which the account has.
    others: int = 0
    # Shows the account.
    show_command: str = ""
    # Runs the test alone.
    rerun_command: str = ""
    # What was noticed after it was judged.
    notes: tuple[str, ...] = ()
    # All that is known of it.
    account: str = ""
    text: str | None = None

    @classmethod
    def of_text(cls, text: str, site: Site | None = None, title: str = "", rerun_command: str = "") -> FailureView:
        """A failure of which a text is known, and perhaps the line where it failed."""
        first = text.strip().partition("\n")[0]
        return cls(title or first, sites=(site,) if site else (), text=text, rerun_command=rerun_command)

    @property
    def headline(self) -> str:
        """The first line of the text."""
        if self.text is not None:
            return f"{self.within}{self.text}".strip().partition("\n")[0]
        return _encodable(cut(without_colours(f"{self.within}{self.title}"), _LONGEST_TITLE))

    @property
    def place(self) -> Site | None:
        """The line where it failed, to recognise failures with one cause."""
        return next((row.site for row in self.rows if row.site is not None), next(iter(self.sites), None))

    def parts(self, in_page: bool = False) -> ScreenParts:
        """The parts for which one screen has room. A failure that has only a text has none.

        `in_page`: with all that the exception says, such as the difference from a budget.
        """
        for detail in (_OF_PAGE,) if in_page else _DETAILS:
            parts = self._parts(detail)
            if height("\n".join(line.text for line in replace(parts, notes=[]).lines())) <= MOST_SCREEN_LINES:
                break
        if self.others:
            parts.remarks.append(f"and {self.others} more failure{'s' * (self.others > 1)} of this test")
        return parts

    def _parts(self, detail: Detail) -> ScreenParts:
        printed = self.printed[max(0, len(self.printed) - detail.printed) :]
        return ScreenParts(
            self.headline,
            _table(self.rows),
            list(self._code(self.sites[: detail.sites], detail.context)),
            [*self.values[: detail.values], *(Value(f"printed: {line}") for line in printed)],
            list(self.remarks),
            self.show_command,
            self.rerun_command,
            list(self.notes),
        )

    def _code(self, sites: Iterable[Site], context: int) -> Iterator[CodeLine]:
        """The lines of these sites, each with `context` lines before it."""
        at_fault: dict[str, dict[int, bool]] = {}
        for site in sites:
            lines = at_fault.setdefault(site.file, {})
            for number in range(max(1, site.line - context), site.line + 1):
                lines[number] = lines.get(number, False) or number == site.line
        for file, numbers in at_fault.items():
            known = {line.number: line.text for line in self.source if line.file == file and line.number in numbers}
            written = [text for text in known.values() if text.strip()]
            common = min((len(text) - len(text.lstrip()) for text in written), default=0)
            for number in sorted(known) if written else ():
                yield CodeLine(number, known[number][common:], numbers[number])

    def lines(self, show_command: str = "") -> list[Line]:
        """One screen, line by line; of a failure that has only a text, all of that. The first line is the title.

        `show_command`: named in place of its own, if it has one.
        """
        if self.text is not None:
            whole = "\n\n".join([f"{self.within}{self.text}", *self.notes])
            return [Line(text) for text in whole.split("\n")]
        parts = self.parts()
        if show_command and parts.show_command:
            parts = replace(parts, show_command=show_command)
        return [Line(_encodable(text), kind) for text, kind in parts.lines()]

    @property
    def screen(self) -> str:
        return "\n".join(line.text for line in self.lines())

    @property
    def whole_account(self) -> str:
        """All that is known of it, with the command that runs the test alone."""
        if self.text is None:
            return self.account
        alone = f"\n\nTo run it alone:\n  {self.rerun_command}" if self.rerun_command else ""
        return f"{self.screen}{alone}"

    @property
    def account_with_notes(self) -> str:
        return "\n\n".join([self.whole_account, *self.notes]) if self.text is None else self.whole_account

    @property
    def whole(self) -> str:
        """The screen, and behind it the account."""
        return joined(self.screen, self.account) if self.text is None else self.whole_account

    def titled(self, title: str) -> FailureView:
        """This failure with another title, which its text begins with, too, if it has one."""
        text = self.text if self.text is None else self.text.replace(self.title, title, 1)
        return replace(self, title=title, text=text)

    def in_fixture(self, name: str) -> FailureView:
        """This failure as that of a fixture, whose name begins the title."""
        account = f"{name}: {self.account}" if self.account else ""
        return replace(self, within=f"{name}: {self.within}", account=account)

    def with_note(self, note: str) -> FailureView:
        return replace(self, notes=(*self.notes, note))

    def with_remark_in_account(self, remark: str) -> FailureView:
        if self.text is not None:
            return self.with_note(remark)
        return replace(self, account=f"{self.account}\n\n{remark}")

    def with_later(self, others: Sequence[FailureView]) -> FailureView:
        """This failure with others that followed from it, or came after it."""
        accounts = [self.account, *(other.whole_account for other in others)] if self.text is None else []
        notes = (*self.notes, *(other.screen for other in others))
        return replace(self, notes=notes, account="\n\n".join(accounts))

    def cut(self, longest: int) -> FailureView:
        """With no text that is longer than this."""
        text = None if self.text is None else cut_middle(self.text, longest)
        return replace(self, text=text, account=cut_middle(self.account, longest))


def combined(failures: Sequence[FailureView]) -> FailureView:
    """One failure for several of a test: the first, with the number of the others, and the accounts of all."""
    first, *others = failures
    if not others:
        return first
    if all(failure.text is not None for failure in failures):
        text = "\n\n".join(failure.screen for failure in failures)
        return replace(first, within="", text=text, notes=(), sites=failures[-1].sites)
    if first.text is not None:
        rows = tuple(RankRow((), "", site) for site in first.sites[:1])
        values = tuple(Value(line) for line in first.text.split("\n")[1:] if line.strip())
        first = replace(first, title=first.headline, within="", text=None, rows=rows, values=values)
    accounts = "\n\n".join(failure.whole_account for failure in failures)
    return replace(first, others=len(others), account=accounts)


def joined(screen: str, account: str) -> str:
    """The text of a failure on one screen with its account, unless they are the same."""
    return f"{screen}{WHOLE_ACCOUNT}{account}" if account and account != screen else screen


def height(text: str, columns: int = WIDTH) -> int:
    """The number of lines that a text takes on a terminal."""
    return sum(_lines_of(line, columns) for line in text.splitlines())


def _lines_of(line: str, columns: int) -> int:
    if line.isascii() and len(line) > columns:
        return len(textwrap.wrap(line, columns))
    return max(1, -(-width(line) // columns))


# Neither a file nor pytest-xdist takes the characters that stand for bytes of names that are not UTF-8.
def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _table(rows: Sequence[RankRow]) -> list[Cell]:
    """The rows as a screen shows them: not all, if there are many."""
    shown = rows[: _MOST_GROUPS if len(rows) <= _MOST_GROUPS else _MOST_GROUPS - 1]
    cells = [Cell(_names(row.ranks), row.did, row.site, row.brief) for row in shown]
    cells = [cell._replace(did=cell.did_in(max(_LONGEST_DOING, cell.least))) for cell in cells]
    if rest := rows[len(shown) :]:
        ranks = [rank for row in rest for rank in row.ranks]
        cells.append(Cell(_names(ranks), f"{len(rest)} other ways", None))
    return cells


def _names(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    names = list_of(ranks)
    return names if len(names) <= _WIDEST_RANKS else f"{len(ranks)} ranks"


def _aligned(cells: Sequence[Cell]) -> Iterator[str]:
    """The table as lines. The text of a call may be cut; its operation, its ranks and its line are not.

    Where there is no room for both, the line of the program is below.
    """
    of_ranks = max((len(cell.ranks) for cell in cells), default=0)
    places = [cell.site.place for cell in cells if cell.ranks and cell.site is not None]
    around = len("    ") + of_ranks
    room = WIDTH - around - (2 + max(map(width, places)) if places else 0)
    is_beside = all(cell.least <= room for cell in cells)
    if not is_beside:
        room = WIDTH - around
    dids = [cell.did_in(room) for cell in cells]
    of_doing = max(map(width, dids), default=0)
    for cell, did in zip(cells, dids, strict=True):
        if not cell.ranks:
            yield f"  {cell.site or ''}"
            continue
        start = f"  {cell.ranks:<{of_ranks}}  {did}"
        if cell.site is None:
            yield start.rstrip()
        elif is_beside:
            start += " " * (of_doing - width(did) + 2)
            # The number of the line says more than the function.
            place = str(cell.site)
            yield start + (place if width(start) + width(place) <= WIDTH else cell.site.place)
        else:
            yield start.rstrip()
            yield " " * around + cell.site.place
