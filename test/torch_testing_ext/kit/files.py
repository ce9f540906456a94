"""Writes the sources of tests."""

import textwrap
from pathlib import Path


def write(directory: Path, name: str, source: str) -> Path:
    """Write a source without its common indentation, with the folders that its name needs."""
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))
    return file
