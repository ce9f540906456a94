"""The root of a project and the folders of its tests, where its settings name none."""

import configparser
import glob
import importlib
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_testing_ext._process.logs import text_of

# Files with settings of ours or of pytest, and how such a section begins. As in pytest, the first with some counts.
_SECTIONS = {
    "pytest.toml": ("",),
    "pytest.ini": ("",),
    ".pytest.ini": ("",),
    "pyproject.toml": ("[tool.torch_testing_ext", "[tool.pytest"),
    "tox.ini": ("[pytest]",),
    "setup.cfg": ("[torch_testing_ext]", "[tool:pytest]"),
}
SETTINGS_FILES = tuple(_SECTIONS)
_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))


def project_root(cwd: Path) -> Path:
    """The nearest folder from here upwards that has settings of ours or of pytest; without any, this one."""
    for folder in (cwd, *cwd.parents):
        for file in _files(folder):
            if file.is_file() and _has_settings(file):
                return folder
    return cwd


def _has_settings(file: Path) -> bool:
    text = text_of(file)
    return any(section in text for section in _SECTIONS[file.name])


def default_folders(root: Path) -> tuple[Path, ...]:
    """pytest's testpaths, if there are any; else `test` and `tests`; else the test files of the root itself."""
    folders = []
    for pattern in _first_testpaths(root):
        for path in sorted(glob.glob(pattern, root_dir=root, recursive=True)):
            folders.append(root / path)
    if not folders:
        folders = [root / name for name in ("test", "tests") if (root / name).is_dir()]
    return tuple(folders or sorted(root.glob("test_*.py")))


def _first_testpaths(root: Path) -> Sequence[str]:
    for file in _files(root):
        patterns = _testpaths(file)
        if patterns:
            return patterns
    return ()


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _SECTIONS]


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
    toml = toml_module()
    if toml is None:
        return ()
    content = toml.loads(text)
    for path in _TABLES:
        table = _table(content, path)
        if "testpaths" in table:
            return table["testpaths"]
    return ()


def _table(content: Any, path: Sequence[str]) -> Any:
    """The table of this name; empty if there is none."""
    for name in path:
        if not isinstance(content, dict):
            return {}
        content = content.get(name)
    return content if isinstance(content, dict) else {}


def toml_module() -> ModuleType | None:
    """The module that reads TOML: tomllib is in Python since 3.11; tomli is a package."""
    for name in ("tomllib", "tomli"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _of_ini(text: str, name: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    section = "tool:pytest" if name == "setup.cfg" else "pytest"
    return parser.get(section, "testpaths", fallback="")
