"""A line of a program."""

import os
from typing import NamedTuple


class Site(NamedTuple):
    """A line of a program, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"

    @property
    def place(self) -> str:
        """The line without the function."""
        return f"{os.path.basename(self.file)}:{self.line}"
