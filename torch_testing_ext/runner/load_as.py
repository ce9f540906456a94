"""The way in which the test files of a run are loaded, and the places where they are."""

from dataclasses import dataclass

# Stands for all files, in the record of what is read.
FILES = "<files>"


@dataclass(frozen=True)
class LoadAs:
    """The way in which the test files of a run are loaded."""

    by_pytest: bool = True  # otherwise unittest's loader imports them
    all_marks: bool = False  # with the tests, too, that pytest's own options deselect by their marks
    # The places where pytest looks for tests, relative to the root; empty for those of its own settings.
    places: tuple[str, ...] = ()
    # More places where it looks.
    more_places: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilesFound:
    """The files that pytest collects, by their paths from the root; and the folders that it cannot, and why."""

    paths: tuple[str, ...]
    failures: tuple[tuple[str, str], ...] = ()
    # The reason why pytest cannot say which files it collects.
    failure: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.failures and not self.failure
