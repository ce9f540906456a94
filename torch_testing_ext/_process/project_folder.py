"""The folder of a project: the nearest one with settings, or a checkout."""

from pathlib import Path

from torch_testing_ext._process.logs import text_of

OURS = "[tool.torch_testing_ext"
# Files with settings of ours or of pytest, and how such a section begins. As in pytest, the first with some counts.
SECTIONS = {
    "pytest.toml": ("",),
    ".pytest.toml": ("",),
    "pytest.ini": ("",),
    ".pytest.ini": ("",),
    "pyproject.toml": (OURS, "[tool.pytest"),
    "tox.ini": ("[pytest]",),
    "setup.cfg": ("[tool:pytest]",),
}


SETTINGS_FILES = tuple(SECTIONS)


def project_root(cwd: Path) -> Path:
    """The nearest folder from here upwards that has settings of ours or of pytest; without any, this one."""
    for folder in (cwd, *cwd.parents):
        for file in files_in(folder):
            if file.is_file() and _has_settings(file):
                return folder
    return cwd


def _has_settings(file: Path) -> bool:
    text = text_of(file)
    return any(section in text for section in SECTIONS[file.name])


def is_of_pytest(file: Path) -> bool:
    """Whether pytest takes its settings from this file, unless one before it has some."""
    if not file.is_file():
        return False
    text = text_of(file)
    return any(section in text for section in SECTIONS[file.name] if OURS not in section)


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that may have settings."""
    return [folder / name for name in SECTIONS]


def is_checkout(folder: Path) -> bool:
    """Whether this is a checkout of PyTorch, or a project that keeps its tests in the same folder."""
    return (folder / "test").is_dir()


def tests_of_checkout(folder: Path) -> Path:
    """The tests of a checkout that are for us."""
    return next(path for path in (folder / "test" / "distributed", folder / "test") if path.is_dir())


def root_of_checkout(path: Path) -> Path:
    """The checkout that contains a test file or folder; if there is none, the folder or that of the file."""
    if is_checkout(path):
        return path
    inside = next((folder.parent for folder in path.parents if folder.name == "test"), None)
    return inside or (path if path.is_dir() else path.parent)
