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
    files = (file for folder in (cwd, *cwd.parents) for file in _files(folder) if file.is_file())
    return next((file.parent for file in files if any(one in text_of(file) for one in _SECTIONS[file.name])), cwd)


def default_folders(root: Path) -> tuple[Path, ...]:
    """pytest's testpaths, if there are any; else `test` and `tests`; else the test files of the root itself."""
    patterns = next((found for file in _files(root) if (found := _testpaths(file))), ())
    named = [root / path for one in patterns for path in sorted(glob.glob(one, root_dir=root, recursive=True))]
    usual = [folder for name in ("test", "tests") if (folder := root / name).is_dir()]
    return tuple(named) or tuple(usual) or tuple(sorted(root.glob("test_*.py")))


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _SECTIONS]


def _testpaths(file: Path) -> Sequence[str]:
    """None if the file cannot be read: pytest will say so, or nobody needs it."""
    text = text_of(file)
    if "testpaths" not in text:
        return ()
    with suppress(ValueError, configparser.Error):  # TOMLDecodeError is a ValueError
        value = _of_toml(text) if file.suffix == ".toml" else _of_ini(text, file.name)
        return shlex.split(value) if isinstance(value, str) else [str(one) for one in value]
    return ()


def _of_toml(text: str) -> Any:
    toml = toml_module()
    content = {} if toml is None else toml.loads(text)
    return next((table["testpaths"] for path in _TABLES if "testpaths" in (table := _table(content, path))), ())


def _table(content: Any, path: Sequence[str]) -> Any:
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
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
    return parser.get("tool:pytest" if name == "setup.cfg" else "pytest", "testpaths", fallback="")
