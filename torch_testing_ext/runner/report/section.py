"""A section: the parts of all reports on results of one class, besides outcomes and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch_testing_ext.runner.model import Attempt, FinishedTest, Summary, TestEnd

from .console_style import Styler

if TYPE_CHECKING:
    # The console has no use for XML, which is slow to import.
    from .xml_elements import Element, Elements

Result = TypeVar("Result")
# A name, a category, the beginning and the end in seconds of the run, and facts.
TraceSlice = tuple[str, str, float, float, dict[str, Any]]


class TraceProcess(NamedTuple):
    """Lanes of a trace below one name. Each has a name, and its slices."""

    name: str
    lanes: list[tuple[str, list[TraceSlice]]]


class Section(Generic[Result]):
    """The parts of reports on results of one class. A section overrides those that it has."""

    # The class.
    kind: type[Result]

    def of(self, summary: Summary) -> list[tuple[FinishedTest, Result]]:
        """The tests whose last attempts have such results, with these."""
        told = [(finished, result) for finished in summary.finished for result in finished.last.end.results]
        return [(finished, result) for finished, result in told if isinstance(result, self.kind)]

    def in_summary(self, summary: Summary, name: Callable[[FinishedTest], str], styler: Styler) -> Iterator[list[str]]:
        """Parts of the final summary, as lines; `name` is how it names a test."""
        yield from ()

    def in_junit(self, result: Result) -> list[str]:
        """Texts before the output of an attempt."""
        return []

    def in_json_of_attempt(self, end: TestEnd) -> dict[str, Any]:
        return {}

    def in_json_of_run(self, summary: Summary) -> dict[str, Any]:
        return {}

    def in_trace(self, attempt: Attempt, result: Result) -> Iterator[TraceProcess]:
        yield from ()

    def in_page_of_attempt(self, result: Result) -> Elements:
        """Elements after the message of an attempt."""
        yield from ()

    def in_page_of_test(self, result: Result) -> Elements:
        """Elements after all attempts of a test; the result is of the last."""
        yield from ()

    def lists_of_page(self, summary: Summary) -> Iterator[tuple[str, list[Element]]]:
        """Lists after all tests, each with a title and its items."""
        yield from ()
