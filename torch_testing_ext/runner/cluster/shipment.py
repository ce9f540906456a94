"""The project as one file, to be sent to nodes that do not share its file system."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.words import first_names

from .agent_messages import ClusterError
from .changes_on_node import LEFT_OUT

# Bytes; a project beyond this size is not meant to be sent.
LARGEST = 2 << 30
# The time of all files, in 2000: archives such as wheels hold none before 1980.
MOMENT = 946_684_800
IGNORED = "git ignores it"
_COMPILED = (".so", ".pyd", ".dylib")
# Files that tools can make again.
_FILES_OF_TOOLS = ("*.pyc", "*_cache", "*.egg-info")


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
            if any(PurePosixPath(name).match(pattern) for pattern in _FILES_OF_TOOLS):
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
