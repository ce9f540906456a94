"""`torchtest init`: finds a project's tests, writes the configuration and a job for CI, and runs the first test.

It overwrites nothing.
"""

import importlib.metadata
import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from string import Template

from torch_testing_ext._process import user_shell
from torch_testing_ext._process.logs import text_of
from torch_testing_ext.runner.scheduling.selection import files_below, relative_to

from . import option_sources
from .model import ExitCode
from .option_sources import default_folders
from .options import UsageError

_TEXTS = Path(__file__).parent / "init"
Main = Callable[[Sequence[str], Path], int]


def init(argv: Sequence[str], root: Path, main: Main) -> int:
    """Set the project up, and return the exit code of its first test. `main` is the runner."""
    if argv:
        if argv[0] not in ("-h", "--help"):
            raise UsageError(f"init takes no arguments, such as {argv[0]}")
        print(f"usage: {user_shell.runner()} init\n\n{_template('help.txt')}", end="")
        return ExitCode.PASSED
    try:
        root = root.resolve()
        files = _set_up(root)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"init: {error}") from None
    names = [relative_to(root, file) for file in files]
    return _run_first(names, root, main)


def _set_up(root: Path) -> list[Path]:
    """Write what is not there yet. Returns the test files."""
    files = sorted(files_below(default_folders(root))) or sorted(files_below([root]))
    if not files:
        files = [root / "tests" / "test_first.py"]
        _write(files[0], _template("first_test.txt"), root)
    folders = {relative_to(root, file).split("/")[0] for file in files}
    _configure(root / "pyproject.toml", sorted(folders))
    _write_job(root)
    return files


def _template(name: str) -> str:
    return (_TEXTS / name).read_text(encoding="utf-8")


def _configure(settings: Path, folders: Sequence[str]) -> None:
    """Say where the tests are, unless the settings do so already."""
    before = settings.read_text(encoding="utf-8") if settings.exists() else ""
    if option_sources.pyproject_section(settings.parent) is not None:
        print(f"kept   {settings.name}: it has settings of torch_testing_ext")
        return
    between = ""
    if before:
        between = "\n" if before.endswith("\n") else "\n\n"
    value = json.dumps(folders, ensure_ascii=False)
    with settings.open("a", encoding="utf-8") as file:
        file.write(f"{between}[tool.torch_testing_ext]\ntests = {value}\n")
    print(f"wrote  {settings.name}: [tool.torch_testing_ext] tests = {', '.join(folders)}")


def _write(file: Path, text: str, root: Path) -> None:
    name = file.relative_to(root)
    if file.exists():
        print(f"kept   {name}")
        return
    print(f"wrote  {name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


_JOB = Path(".github", "workflows", "torchtest.yml")


def _write_job(root: Path) -> None:
    """Write a job for CI, unless nobody knows from where it could install this package."""
    needed = []
    if (root / "requirements.txt").exists():
        needed.append("-r requirements.txt")
    settings = text_of(root / "pyproject.toml")
    if (root / "setup.py").exists() or re.search(r"^\[(project|tool\.poetry)\]", settings, re.MULTILINE):
        # It is a package.
        needed.append(".")
    texts = "\n".join([settings, text_of(root / "requirements.txt"), text_of(root / "setup.py")])
    if not re.search(r"torch[-_.]testing[-_.]ext *(?:[\[@=<>~!\"',;]|$)", texts, re.IGNORECASE | re.MULTILINE):
        # The project does not require it by itself.
        address = _address()
        if address is None:
            print(f"no job {_JOB}: it is not known from where CI can install torch-testing-ext")
            print("       add it to your project's requirements, and run init again")
            return
        needed.append(f"'torch-testing-ext[pytest,ui] @ {address}'")
    install = "\n".join(f"      - run: pip install {package}" for package in needed)
    _write(root / _JOB, Template(_template("torchtest.yml")).substitute(install=install), root)


def _address() -> str | None:
    """The address of git from which this package was installed, or else was built; None if it is not known."""
    with suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("torch-testing-ext")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        vcs_info = origin.get("vcs_info", {})
        if vcs_info.get("vcs") == "git":
            return f"git+{origin['url']}@{vcs_info['commit_id']}"
        for label in distribution.metadata.get_all("Project-URL") or ():
            name, _, url = str(label).partition(", ")
            if name == "Source":
                return f"git+{url}"
    return None


def _run_first(files: Sequence[str], root: Path, main: Main) -> int:
    for name in files:
        with redirect_stdout(io.StringIO()) as listing:
            code = main(["--list=json", name], root)
        if code == ExitCode.PASSED:
            test = json.loads(listing.getvalue())["tests"][0]["id"]
            print(f"\n{user_shell.runner()} {user_shell.test_as_argument(test)}", flush=True)
            return main([test], root)
    # The runner says what is wrong with them.
    return main([], root)
