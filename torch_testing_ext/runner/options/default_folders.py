"""The folders of a project's tests, where its settings name none."""

from __future__ import annotations

import configparser
import glob
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.project_folder import files_in, is_of_pytest
from torch_testing_ext._process.project_settings import read_toml

_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))


def default_folders(root: Path) -> tuple[Path, ...]:
    """pytest's testpaths, if there are any; else the root itself."""
    folders = []
    for pattern in _first_testpaths(root):
        for path in sorted(glob.glob(pattern, root_dir=root, recursive=True)):
            folders.append(root / path)
    return tuple(folders or (root,))


def _first_testpaths(root: Path) -> Sequence[str]:
    return next((_testpaths(file) for file in files_in(root) if is_of_pytest(file)), ())


def _testpaths(file: Path) -> Sequence[str]:
    """None if the file cannot be read: pytest will say so, or nobody needs it."""
    text = text_of(file)
    if "testpaths" not in text:
        return ()
    # TOMLDecodeError is a ValueError.
    with suppress(ValueError, configparser.Error):
        value = _of_toml(text) if file.suffix == ".toml" else _of_ini(text, file.name)
        if isinstance(value, str):
            return shlex.split(value)
        return [str(path) for path in value]
    return ()


def _of_toml(text: str) -> Any:
    content = read_toml(text)
    for path in _TABLES:
        found = table(content, path)
        if "testpaths" in found:
            return found["testpaths"]
    return ()


def toml_content(file: Path) -> Any:
    """The content of a TOML file; empty if it cannot be read."""
    # TOMLDecodeError is a ValueError.
    with suppress(ValueError):
        return read_toml(text_of(file))
    return {}


def table(content: Any, path: Sequence[str]) -> Any:
    """The table of this name; empty if there is none."""
    for name in path:
        if not isinstance(content, dict):
            return {}
        content = content.get(name)
    return content if isinstance(content, dict) else {}


def _of_ini(text: str, name: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    section = "tool:pytest" if name == "setup.cfg" else "pytest"
    return parser.get(section, "testpaths", fallback="")
