"""`torchtest init`: finds a project's tests, writes the configuration and jobs for CI, and runs the first test.

It overwrites nothing.
"""

import configparser
import importlib.metadata
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from string import Template
from typing import Any

from torch_testing_ext._process import shell_words, user_commands
from torch_testing_ext._process.logs import text_of
from torch_testing_ext.runner.scheduling.finding_files import files_below, relative_to

from .model import ExitCode
from .options import UsageError, layers
from .options.default_folders import default_folders, table, toml_content

_TEXTS = Path(__file__).parent / "init"
Main = Callable[[Sequence[str], Path], int]


def init(argv: Sequence[str], root: Path, main: Main) -> int:
    """Set the project up, and return the exit code of its first test. `main` is the runner."""
    root = root.resolve()
    try:
        match [word for argument in argv for word in argument.split("=", 1)]:
            case []:
                files = _set_up(root)
            case ["--agents"]:
                return _write_for_agents(root)
            case ["--ci", *service] if not service or service in [[name] for name in _SERVICES]:
                return _write_shards(root, service[0] if service else _service(root))
            case ["-h" | "--help", *_]:
                usage = f"init [--agents | --ci [{'|'.join(_SERVICES)}]]"
                print(f"usage: {user_commands.runner()} {usage}\n\n{_template('help.txt')}", end="")
                return ExitCode.PASSED
            case words:
                known = f"--agents and --ci [{'|'.join(_SERVICES)}]"
                raise UsageError(f"init has no argument but {known}: leave out {words[-1]}")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"init: {error}") from None
    names = [relative_to(root, file) for file in files]
    return _run_first(names, root, main)


def _set_up(root: Path) -> list[Path]:
    """Write what is not there yet. Returns the test files."""
    usual = [root / name for name in ("test", "tests") if (root / name).is_dir()]
    folders_of_pytest = default_folders(root)
    places = folders_of_pytest if folders_of_pytest != (root,) else usual
    files = sorted(files_below(places)) or sorted(files_below([root]))
    if not files:
        files = [root / "tests" / "test_first.py"]
        _write(files[0], _template("first_test.txt"), root)
    folders = {relative_to(root, file).split("/")[0] for file in files}
    _configure(root / "pyproject.toml", sorted(folders))
    _write_job(root)
    return files


def _write_for_agents(root: Path) -> int:
    """Write a page for programs that run tests and read failures; print it if there is one already."""
    _write_or_show(root / "AGENTS.md", _template("agents.md"), root)
    return ExitCode.PASSED


def _write_or_show(file: Path, text: str, root: Path) -> None:
    """Write a file; print the text if there is another one already."""
    _write(file, text, root)
    if text_of(file) != text:
        print(f"\nTo add to it:\n\n{text}", end="")


# The file in which each service of CI looks for its jobs.
_SERVICES = {
    "github": Path(".github", "workflows", "torchtest.yml"),
    "gitlab": Path(".gitlab-ci.yml"),
    "buildkite": Path(".buildkite", "pipeline.yml"),
}


def _service(root: Path) -> str:
    """The service that the project uses, as far as its files say."""
    return next((name for name, file in reversed(_SERVICES.items()) if (root / file.parts[0]).exists()), "github")


def _write_shards(root: Path, service: str) -> int:
    """Write jobs that run shards, merge their files, and fail at tests that never run."""
    packages = _packages(root)
    if packages is None:
        return ExitCode.USAGE
    jobs = _job(f"ci_{service}.yml", packages)
    _write_or_show(root / _SERVICES[service], jobs, root)
    _write(root / "known-holes.txt", _template("known_holes.txt"), root)
    return ExitCode.PASSED


def _template(name: str) -> str:
    return (_TEXTS / name).read_text(encoding="utf-8")


def _configure(settings: Path, folders: Sequence[str]) -> None:
    """Say where the tests are, unless the settings do so already."""
    before = settings.read_text(encoding="utf-8") if settings.exists() else ""
    if layers.pyproject_section(settings.parent) is not None:
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


def _write_job(root: Path) -> None:
    """Write a job for CI, unless nobody knows from where it could install this package."""
    packages = _packages(root)
    if packages is not None:
        _write(root / _SERVICES["github"], _job("torchtest.yml", packages), root)


def _job(template: str, packages: str) -> str:
    python = "{}.{}".format(*sys.version_info)
    return Template(_template(template)).substitute(python=python, packages=packages)


def _packages(root: Path) -> str | None:
    """The words by which pip installs what the tests need; None, and a message, if nobody knows them."""
    needed = []
    if (root / "requirements.txt").exists():
        needed.append("-r requirements.txt")
    settings = text_of(root / "pyproject.toml")
    if (root / "setup.py").exists() or re.search(r"^\[(project|tool\.poetry)\]", settings, re.MULTILINE):
        # It is a package.
        needed.append(".")
    bringing = [what for what, requirements in _requirements(root) if any(map(_IS_KIT.match, requirements))]
    if bringing:
        # The project requires it by itself; an extra of the project brings all that the project needs, too.
        needed = [what for what in needed if what != "." or not bringing[0].startswith("'.[")]
        needed += [what for what in bringing[:1] if what not in needed]
        # The project may not require it: `torchtest` runs tests of unittest without pytest.
        needed.append("pytest")
    else:
        kit = _requirement()
        if kit is None:
            print(
                f"no job {_SERVICES['github']}: torch-testing-ext was installed from a file or folder of this machine"
            )
            print("       add torch-testing-ext to your project's requirements, and run init again")
            return None
        needed.append(f"'{kit}'")
    return " ".join(needed)


_IS_KIT = re.compile(r"\s*torch[-_.]testing[-_.]ext\s*(?:[\[@=<>~!;#]|$)", re.IGNORECASE)


def _requirements(root: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The requirements of the project, each list with the words by which pip installs it."""
    yield "-r requirements.txt", text_of(root / "requirements.txt").splitlines()
    content = toml_content(root / "pyproject.toml")
    yield ".", _texts(table(content, ("project",)).get("dependencies"))
    # Poetry has them by name.
    yield ".", _texts(table(content, ("tool", "poetry", "dependencies")))
    setup = configparser.ConfigParser(interpolation=None, strict=False)
    with suppress(configparser.Error):
        setup.read_string(text_of(root / "setup.cfg"))
    yield ".", setup.get("options", "install_requires", fallback="").splitlines()
    setup_py = text_of(root / "setup.py")
    if "extras_require" not in setup_py:
        yield ".", re.findall("[\"']([^\"']+)[\"']", setup_py)
    for extra, requirements in table(content, ("project", "optional-dependencies")).items():
        yield f"'.[{extra}]'", _texts(requirements)
    if setup.has_section("options.extras_require"):
        for extra, lines in setup["options.extras_require"].items():
            yield f"'.[{extra}]'", lines.splitlines()
    for group, requirements in table(content, ("dependency-groups",)).items():
        yield f"--group {group}", _texts(requirements)


def _texts(values: Any) -> list[str]:
    return [value for value in values or () if isinstance(value, str)]


def _requirement() -> str | None:
    """The requirement by which pip finds what is installed here; None if only this machine has it."""
    name = "torch-testing-ext"
    with suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(name)
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        kit = f"{name}[pytest]"
        url = str(origin.get("url", ""))
        vcs_info = origin.get("vcs_info", {})
        if vcs_info.get("vcs") == "git":
            return f"{kit} @ git+{url}@{vcs_info['commit_id']}"
        if not url:
            # It was installed from an index.
            return f"{kit}=={distribution.version}"
        if url.startswith(("http:", "https:")):
            return f"{kit} @ {url}"
        # The address with which it was built.
        for label in distribution.metadata.get_all("Project-URL") or ():
            title, _, source = str(label).partition(", ")
            if title == "Source":
                return f"{kit} @ git+{source}"
    return None


def _run_first(files: Sequence[str], root: Path, main: Main) -> int:
    for name in files:
        with redirect_stdout(io.StringIO()) as listing:
            code = main(["--list=json", name], root)
        if code == ExitCode.PASSED:
            test = json.loads(listing.getvalue())["tests"][0]["id"]
            print(f"\n{user_commands.runner()} {shell_words.test_as_argument(test)}", flush=True)
            return main([test], root)
    # The runner says what is wrong with them.
    return main([], root)
