"""Everything that travels between this machine and a node: variables, versions, the project, changed files."""

import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch_testing_ext
from torch_testing_ext._machine.machine_resources import LEASE_FOLDER, LEASED, all_masks
from torch_testing_ext._process.project_settings import DEVICES_OF_RUN
from torch_testing_ext._process.words import first_names
from torch_testing_ext.launch.environment import PREFIX, RUNNER_PREFIX

from .agent_messages import ClusterError, FileChanged, NodeFacts
from .ray_actor import digest_of

# --------------------------------------------------------------------------------------------------------------------
# The environment of tests on other machines: variables and versions of run_test.py, nothing of a worker of Ray.

# What describes a machine, a login or a job: each node has its own.
_OF_MACHINE = {
    *("PATH", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOSTTYPE"),
    *("TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("DISPLAY", "WAYLAND_DISPLAY", "TERM", "COLORTERM", "COLUMNS", "LINES", "TTY", "CUDA_HOME", "CUDA_PATH"),
    *("NVIDIA_VISIBLE_DEVICES", "INVOCATION_ID", "JOURNAL_STREAM", "KUBECONFIG", "EDITOR", "PAGER"),
}
_PREFIXES_OF_MACHINE = (
    *("RAY_", "SLURM_", "SSH_", "XDG_", "DBUS_", "CONDA_", "KUBERNETES_", "LC_", "LESS", "PYENV_", "SUDO_"),
)

LOGS = PREFIX + "LOGS"
# run_test.py decides for the nodes.
_OF_RUN = (LEASED, LEASE_FOLDER, RUNNER_PREFIX)
# Not UTF-8: an environment may hold any.
_OTHER_BYTES = re.compile("[\ud800-\udfff]")
_SECRET = re.compile(
    r"(?i)(^|_)(TOKENS?|SECRETS?|PASS|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|KEYS?|CREDENTIALS?|AUTH|COOKIE|PAT)(_|$)"
)


def environment_for_nodes(environ: Mapping[str, str], choice: str = "") -> dict[str, str]:
    """The variables that a test may read: all but secrets and what is of this machine. `choice`: of cluster.env."""
    named = names_in(choice)
    sent = {}
    masks = all_masks(environ)
    for name, value in environ.items():
        if name not in named and (_is_of_machine(name) or _SECRET.search(name)):
            continue
        # The option of the run, which counts there as here.
        is_chosen = name == DEVICES_OF_RUN or _is_chosen(name, choice)
        if name in masks or name.startswith(_OF_RUN) or not is_chosen:
            continue
        if not _OTHER_BYTES.search(name + value):
            sent[name] = value
    return sent


def names_in(choice: str) -> list[str]:
    """The names or patterns of cluster.env, with their dashes."""
    return [name for name in choice.split(",") if name]


def _is_chosen(name: str, choice: str) -> bool:
    patterns = names_in(choice)
    if not patterns or patterns[0].startswith("-"):
        return not any(fnmatchcase(name, pattern[1:]) for pattern in patterns)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def notes_on_environment(environ: Mapping[str, str], choice: str = "") -> list[str]:
    """The variables that are not sent because they look like secrets, and names that are none, in words."""
    sent = environment_for_nodes(environ, choice)
    secrets = []
    for name in sorted(environ):
        if name in sent or _is_of_machine(name):
            continue
        if _SECRET.search(name) and _is_chosen(name, choice):
            secrets.append(name)
    unknown = []
    for name in names_in(choice):
        if not name.startswith("-") and "*" not in name and name not in environ:
            unknown.append(name)
    notes = []
    if secrets:
        notes.append(
            "variables that look like secrets are not sent to the nodes, unless cluster.env names them: "
            + ", ".join(secrets)
        )
    if unknown:
        notes.append(f"cluster.env names variables that are not set here: {', '.join(unknown)}")
    return notes


def withheld_variables(environ: Mapping[str, str], choice: str) -> set[str]:
    """The variables that a program on a node must not get although it has all those of this machine."""
    sent = environment_for_nodes(environ, choice)
    return {name for name in environ if name not in sent and not _is_of_machine(name)}


def _is_of_machine(name: str) -> bool:
    return name in _OF_MACHINE or name.startswith(_PREFIXES_OF_MACHINE)


def undo_worker() -> list[str]:
    """Give this process, which a worker of Ray has started, what a shell would. Returns a warning if that fails."""
    # Only root may lower it: the kernel then prefers our processes when it is out of memory.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0", encoding="ascii")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(nice, 0))
    except OSError:
        more = "which makes them slower beside other work: start Ray with RAY_worker_niceness=0"
        return [f"tests run at niceness {nice}, {more}"]
    return []


MISSING = "not installed"
_NAMES = {
    "package": "torch_testing_ext",
    "torch": "torch",
    "cuda": "CUDA or ROCm of torch",
    "python": "Python",
    "platform": "platform",
}


@functools.cache
def facts_of_machine() -> NodeFacts:
    torch = _torch_version()
    return NodeFacts(
        _package(),
        torch.get("__version__", MISSING),
        torch.get("cuda", "") or torch.get("hip", ""),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
    )


def _package() -> str:
    try:
        version = importlib.metadata.version("torch-testing-ext")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a package"
    # A version under development has one number for many states.
    return f"{version}, sources {digest_of(str(Path(torch_testing_ext.__file__).parent))[:12]}"


def _torch_version() -> dict[str, str]:
    """The texts that torch/version.py assigns: importing torch takes seconds."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.submodule_search_locations:
            file = Path(spec.submodule_search_locations[0], "version.py")
            assignment = r"^(\w+)\s*(?::[^=\n]*)?=\s*(['\"])(.*?)\2\s*$"
            matches = re.findall(assignment, file.read_text(encoding="utf-8"), re.MULTILINE)
            return {name: value for name, _, value in matches}
    return {}


def differing_facts(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> list[str]:
    """A line for each fact in which a node differs from this machine."""
    lines = []
    for node, there in nodes.items():
        for field in fields(NodeFacts):
            on_node = getattr(there, field.name)
            on_this_machine = getattr(here, field.name)
            if on_node != on_this_machine:
                name = _NAMES[field.name]
                lines.append(f"  {node}: {name} is {on_node or 'none'}, here {on_this_machine or 'none'}")
    return lines


# --------------------------------------------------------------------------------------------------------------------
# The files of the project that tests change on the nodes: found there, merged and written here.

LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".torch_testing_ext", ".pytest_cache"}
# Bytes of a file that comes back.
LARGEST_FILE = 256 << 20
_ACCEPTED = (".py", ".expect")


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file, or a folder that it is in, matches a pattern, in which `*` stands for slashes, too."""
    for pattern in patterns:
        folder = pattern.rstrip("/")
        if fnmatch(name, pattern) or fnmatch(name, f"{folder}/*"):
            return True
    return False


# -- on a node


class _FileState(NamedTuple):
    modified: int
    size: int


class ProjectWatch:
    """The state of a node's copy of the project before its tests, and the files that differ from it."""

    def __init__(self, root: Path, patterns: Sequence[str], accepts: bool):
        """`accepts`: tests rewrite expected texts, which come back by themselves."""
        self._root = root
        self._patterns = patterns
        self._accepts = accepts
        self._before = dict(self._states())

    def _states(self) -> Iterator[tuple[str, _FileState]]:
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                except OSError:
                    continue
                yield os.path.relpath(path, self._root), _FileState(status.st_mtime_ns, status.st_size)

    def changes(self) -> Iterator[FileChanged]:
        """The files of the project that have changed, and new files that are wanted."""
        after = dict(self._states())
        for name in sorted(self._before.keys() - after.keys()):
            yield FileChanged(name, "", None)
        for name, state in sorted(after.items()):
            if state == self._before.get(name):
                continue
            is_wanted = self._is_wanted(name)
            path = self._root / name
            if not path.is_file() or not (is_wanted or name in self._before):
                continue
            if state.size > LARGEST_FILE:
                yield FileChanged(name, f"{state.size >> 20} MiB", None)
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            yield FileChanged(name, digest, content if is_wanted else None)

    def _is_wanted(self, name: str) -> bool:
        if matches_pattern(name, self._patterns):
            return True
        if not self._accepts or not name.endswith(_ACCEPTED):
            return False
        return name in self._before or name.endswith(".expect")


# -- here


class _Version(NamedTuple):
    node: str
    content: bytes


@dataclass(frozen=True, order=True)
class _Edit:
    """Lines that take the place of others: those from `start` to `end`, which are the same for an insertion."""

    start: int
    end: int
    lines: tuple[bytes, ...]


class ComingBack:
    """The files that nodes have sent, to be written when all nodes have ended."""

    def __init__(self, root: Path, sent: Callable[[str], bytes | None], elsewhere: Mapping[str, Path]):
        """`sent`: a file as the nodes got it. `elsewhere`: folders of the project on nodes that are others here."""
        self._root = root
        self._sent = sent
        self._elsewhere = elsewhere
        self._versions: dict[str, list[_Version]] = {}
        self._stays: set[str] = set()

    def add(self, node: str, changed: FileChanged) -> None:
        before = self._sent(changed.name)
        digest = "" if before is None else hashlib.sha256(before).hexdigest()
        if changed.digest == digest:
            # It was only touched, or the set-up had created it and a test has removed it.
            return
        if changed.content is None:
            self._stays.add(changed.name)
            return
        versions = self._versions.setdefault(changed.name, [])
        versions.append(_Version(node, changed.content))

    def write(self) -> tuple[list[str], list[str]]:
        """Write all that came. Returns the names of the files written, and warnings."""
        written = []
        warnings = []
        for name, versions in sorted(self._versions.items()):
            try:
                written += self._write_file(name, versions)
            except (OSError, ValueError) as error:
                warnings.append(f"{name}, which tests have changed on nodes, stays as it is here: {error}")
        stays = sorted(self._stays - self._versions.keys())
        if stays:
            warnings.append(
                f"tests have changed files of the project on nodes, which stay as they are here: {first_names(stays)}; "
                "name them with cluster.fetch"
            )
        self._versions = {}
        self._stays = set()
        return written, warnings

    def _write_file(self, name: str, versions: Sequence[_Version]) -> list[str]:
        """Write a file with the changes of all nodes. Returns the names of the files written."""
        path = self._place(name)
        before = self._sent(name)
        if before is None:
            return self._write_new(path, versions)
        current = path.read_bytes() if path.exists() else before
        # Each content once.
        contents = list(dict.fromkeys(version.content for version in versions))
        merged = merge_versions(before, [current, *contents])
        if merged is None:
            nodes = " and ".join(dict.fromkeys(version.node for version in versions))
            if current != before:
                nodes += " and here"
            raise ValueError(f"its changes on {nodes} contradict each other")
        path.write_bytes(merged)
        return [name]

    def _write_new(self, path: Path, versions: Sequence[_Version]) -> list[str]:
        """Write a file that nodes have created: one that differs from the first gets the name of its node, too."""
        shown = str(path)
        if path.is_relative_to(self._root):
            shown = str(path.relative_to(self._root))
        first = versions[0].content
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(first)
        others = {version.node: version.content for version in versions if version.content != first}
        written = [shown]
        for node, content in others.items():
            path.with_name(f"{path.name}@{node}").write_bytes(content)
            written.append(f"{shown}@{node}")
        return written

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError("it is not below the project")
        base = self._root
        if parts[0] in self._elsewhere:
            base = self._elsewhere[parts[0]]
            parts = parts[1:]
        path = base.joinpath(*parts)
        if not path.parent.resolve().is_relative_to(base.resolve()) or path.is_symlink():
            raise ValueError("a symbolic link leads to it")
        return path


def merge_versions(before: bytes, versions: Sequence[bytes]) -> bytes | None:
    """The text with the changes of all versions; None if some contradict each other."""
    lines = before.splitlines(keepends=True)
    edits: set[_Edit] = set()
    for version in versions:
        edits.update(_edits(lines, version.splitlines(keepends=True)))
    merged: list[bytes] = []
    position = 0
    last_start = -1
    for edit in sorted(edits):
        if edit.start < position or edit.start == last_start:
            return None
        merged += lines[position : edit.start]
        merged += edit.lines
        position = edit.end
        last_start = edit.start
    merged += lines[position:]
    return b"".join(merged)


def _edits(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[_Edit]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            yield _Edit(start, end, tuple(after[new_start:new_end]))


# --------------------------------------------------------------------------------------------------------------------
# The project as one file, to be sent to nodes that do not share its file system.

# Bytes; a project beyond this size is not meant to be sent.
LARGEST = 2 << 30
# The time of all files, in 2000: archives such as wheels hold none before 1980.
MOMENT = 946_684_800
IGNORED = "git ignores it"
_COMPILED = (".so", ".pyd", ".dylib")
# Files that tools can make again.
_OF_TOOLS = ("*.pyc", "*_cache", "*.egg-info")


@dataclass(frozen=True)
class Shipment:
    """The files of the project that are sent, and what is not, with the reason."""

    root: Path
    # Also links, and empty folders.
    files: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def times(self) -> dict[str, int]:
        """The modification times, which are not in the archive, since nodes know that by its bytes."""
        times = {}
        for name in self.files:
            status = _lstat(self.root / name)
            if status is not None:
                times[name] = status.st_mtime_ns
        return times

    @property
    def warnings(self) -> list[str]:
        """Warnings about files that are not sent, by the reason, except for files that tools can make again."""
        compiled = []
        ignored = []
        others = []
        for name, why in self.left_out.items():
            if any(PurePosixPath(name).match(pattern) for pattern in _OF_TOOLS):
                continue
            if name.endswith(_COMPILED):
                compiled.append(name)
            elif why == IGNORED:
                ignored.append(name)
            if why != IGNORED:
                others.append(f"{name} ({why})")
        warnings = []
        if compiled:
            warnings.append(
                f"compiled files that git ignores are not sent to the nodes: {first_names(compiled)}; build them there "
                "with cluster.setup, or use cluster.root"
            )
        if ignored:
            names = first_names(ignored)
            warnings.append(f"what git ignores is not sent to the nodes: {names}; --cluster with --dry-run lists all")
        if others:
            warnings.append(f"not sent to the nodes: {first_names(others)}")
        return warnings

    def describe(self) -> str:
        """All names, for --dry-run."""
        left_out = [f"not sent: {name} ({why})" for name, why in sorted(self.left_out.items())]
        return "\n".join([*self.files, *left_out])


def choose_files(root: Path, wanted: Iterable[str] = ()) -> Shipment:
    """Choose what git lists and untracked files, or without git, all but caches; and in any case, what is `wanted`."""
    files, left_out = _listed(root)
    wanted = tuple(wanted)
    for name in wanted:
        if (root / name).is_dir():
            files.update(_walk(root, name))
        elif _is_there(root / name):
            files.add(name)
    for name in files:
        path = root / name
        if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
            left_out[name] = "only as a link, which leads out of the project"
    for name in wanted:
        left_out.pop(name, None)
    return Shipment(root, tuple(sorted(files)), left_out)


def write_tar(shipment: Shipment, target: Path) -> None:
    """Write a tar. The same files give the same bytes, by which a node recognises a project. Raises ClusterError."""
    root = shipment.root
    size = 0
    for name in shipment.files:
        status = _lstat(root / name)
        if status is not None:
            size += status.st_size
    if size > LARGEST:
        raise ClusterError(
            f"{root} cannot be sent to the nodes: it has {size >> 20} MiB, more than {LARGEST >> 20}. "
            "Use cluster.root with a path on a shared file system, or have git ignore what tests do not need."
        )
    try:
        # Symbolic links stay links.
        with tarfile.open(target, "w") as tar:
            for name in shipment.files:
                # It may be gone since it was listed, such as a file of another run.
                with suppress(FileNotFoundError):
                    tar.add(root / name, name, recursive=False, filter=_without_origin)
    except OSError as error:
        raise ClusterError(f"{root} cannot be sent to the nodes: {error}") from error


def sent_file(archive: tarfile.TarFile, name: str) -> bytes | None:
    """A file as the nodes got it; None if they did not."""
    with suppress(KeyError):
        file = archive.extractfile(name)
        return None if file is None else file.read()
    return None


def split_path(text: str, root: Path, cwd: Path) -> tuple[list[str], list[str]]:
    """The entries of PYTHONPATH that are below the project, relative to it, and those that are not.

    Those of the interpreter are no matter: the nodes have the same.
    """
    below = []
    elsewhere = []
    for entry in text.split(os.pathsep):
        if not entry:
            continue
        path = Path(os.path.normpath(cwd / entry))
        is_of_interpreter = path.is_relative_to(sys.prefix) or path.is_relative_to(sys.base_prefix)
        if path.is_relative_to(root):
            below.append(str(path.relative_to(root)))
        elif not is_of_interpreter:
            elsewhere.append(entry)
    return below, elsewhere


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out what may differ between two checkouts of the same files."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = MOMENT
    return member


def _listed(root: Path) -> tuple[set[str], dict[str, str]]:
    """The files of a folder, its submodules and repositories in it; and what is left out."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    is_ignored = _git(root, "check-ignore", "-q", ".") is not None
    if listed is None or is_ignored:
        return set(_walk(root)), {}
    left_out = {}
    for name in _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory") or ():
        if LEFT_OUT.isdisjoint(Path(name).parts):
            left_out[name] = IGNORED
    files: set[str] = set()
    for name in _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--directory") or ():
        if name.endswith("/"):
            files.update(_walk(root, name, empty_only=True))
    for name in listed:
        name = name.rstrip("/")
        path = root / name
        if _is_there(path):
            files.add(name)
        elif (path / ".git").exists():
            # A repository of its own.
            more, more_left_out = _listed(path)
            files.update(os.path.normpath(f"{name}/{inner}") for inner in more)
            left_out.update((f"{name}/{inner}", why) for inner, why in more_left_out.items())
        elif path.is_dir():
            files.add(os.path.normpath(name))
    return files, left_out


def _git(root: Path, *words: str) -> list[str] | None:
    """The names that a command of git lists; None if the folder is no checkout or there is no git."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _is_there(file: Path) -> bool:
    """Whether it can be sent: a file that was deleted is still listed, and a submodule is a folder."""
    return os.path.lexists(file) and (file.is_symlink() or file.is_file())


def _walk(root: Path, below: str = "", empty_only: bool = False) -> Iterator[str]:
    """The files and the empty folders in a folder of the project, relative to it."""
    for folder, folders, files in os.walk(root / below):
        if empty_only and ".git" in (*folders, *files):
            # A repository of its own.
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        if not (files or folders) and Path(folder) != root:
            yield str(Path(folder).relative_to(root))
        if empty_only:
            continue
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            path = Path(folder, name)
            if _is_there(path):
                yield str(path.relative_to(root))
