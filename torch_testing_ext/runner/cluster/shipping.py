"""The project as one file, to be sent to nodes that do not share its file system."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.words import first_names

from .cluster_nodes import ClusterError
from .project_changes import LEFT_OUT

LARGEST = 2 << 30  # bytes; a project beyond this size is not meant to be sent
MOMENT = 946_684_800  # the time of all files, in 2000: archives such as wheels hold none before 1980
IGNORED = "git ignores it"
_COMPILED = (".so", ".pyd", ".dylib")
_OF_TOOLS = ("*.pyc", "*_cache", "*.egg-info")  # what tools can make again


@dataclass(frozen=True)
class Shipment:
    """The files of the project that are sent, and what is not, with the reason."""

    root: Path
    files: tuple[str, ...]  # also links, and empty folders
    left_out: Mapping[str, str]

    @property
    def times(self) -> dict[str, int]:
        """The modification times, which are not in the archive, since nodes know that by its bytes."""
        return {name: found.st_mtime_ns for name in self.files if (found := _lstat(self.root / name)) is not None}

    @property
    def warnings(self) -> list[str]:
        names = [name for name in self.left_out if not any(PurePosixPath(name).match(one) for one in _OF_TOOLS)]
        compiled = [name for name in names if name.endswith(_COMPILED)]
        ignored = [name for name in names if self.left_out[name] == IGNORED and name not in compiled]
        others = [f"{name} ({self.left_out[name]})" for name in names if self.left_out[name] != IGNORED]
        said = {
            "compiled files that git ignores are not sent to the nodes: {}; build them there with --cluster-setup, or "
            "use --cluster-root": compiled,
            "what git ignores is not sent to the nodes: {}; --cluster-dry-run lists all": ignored,
            "not sent to the nodes: {}": others,
        }
        return [text.format(first_names(some)) for text, some in said.items() if some]

    def describe(self) -> str:
        """All names, for --cluster-dry-run."""
        left_out = [f"not sent: {name} ({why})" for name, why in sorted(self.left_out.items())]
        return "\n".join([*self.files, *left_out])


def choose(root: Path, wanted: Iterable[str] = ()) -> Shipment:
    """Choose what git lists and untracked files, or without git, all but caches; and in any case, what is `wanted`."""
    files, left_out = _listed(root)
    for name in wanted:
        files |= set(_walk(root, name)) if (root / name).is_dir() else {name} if _is_there(root / name) else set()
    for name in files:
        if (root / name).is_symlink() and not (root / name).resolve().is_relative_to(root.resolve()):
            left_out[name] = "only as a link, which leads out of the project"
    return Shipment(root, tuple(sorted(files)), {name: why for name, why in left_out.items() if name not in wanted})


def write(shipment: Shipment, target: Path) -> None:
    """Write a tar. The same files give the same bytes, by which a node recognises a project. Raises ClusterError."""
    root = shipment.root
    size = sum(found.st_size for name in shipment.files if (found := _lstat(root / name)) is not None)
    if size > LARGEST:
        raise ClusterError(
            f"{root} cannot be sent to the nodes: it has {size >> 20} MiB, more than {LARGEST >> 20}. "
            "Use --cluster-root with a path on a shared file system, or have git ignore what tests do not need."
        )
    try:
        with tarfile.open(target, "w") as tar:  # symbolic links stay links
            for name in shipment.files:
                with suppress(FileNotFoundError):  # gone since it was listed, such as a file of another run
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
    below, elsewhere = [], []
    for entry in filter(None, text.split(os.pathsep)):
        path = Path(os.path.normpath(cwd / entry))
        if path.is_relative_to(root):
            below.append(str(path.relative_to(root)))
        elif not any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix)):
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
    if listed is None or _git(root, "check-ignore", "-q", ".") is not None:
        return set(_walk(root)), {}
    ignored = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory") or []
    left_out = {name: IGNORED for name in ignored if not LEFT_OUT.intersection(Path(name).parts)}
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--directory") or []
    files = {name for folder in untracked if folder.endswith("/") for name in _walk(root, folder, empty_only=True)}
    for name in (name.rstrip("/") for name in listed):
        path = root / name
        if _is_there(path):
            files.add(name)
        elif path.is_dir():  # a repository of its own
            more, more_left_out = _listed(path) if (path / ".git").exists() else ({"."}, {})
            files |= {os.path.normpath(f"{name}/{one}") for one in more}
            left_out.update({f"{name}/{one}": why for one, why in more_left_out.items()})
    return files, left_out


def _git(root: Path, *words: str) -> list[str] | None:
    """The names that a command of git lists; None if the folder is no checkout or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name] if done.returncode == 0 else None


def _is_there(file: Path) -> bool:
    """Whether it can be sent: a file that was deleted is still listed, and a submodule is a folder."""
    return os.path.lexists(file) and (file.is_symlink() or file.is_file())


def _walk(root: Path, below: str = "", empty_only: bool = False) -> Iterator[str]:
    """The files and the empty folders in a folder of the project, relative to it."""
    for folder, folders, files in os.walk(root / below):
        kept: Sequence[str] = [name for name in folders if name not in LEFT_OUT]
        if ".git" in (*folders, *files) and empty_only:  # a repository of its own
            kept, files = [], ["."]
        folders[:] = kept
        links = [name for name in folders if Path(folder, name).is_symlink()]
        if not (files or folders) and Path(folder) != root:
            yield str(Path(folder).relative_to(root))
        for name in () if empty_only else (*files, *links):
            path = Path(folder, name)
            if _is_there(path):
                yield str(path.relative_to(root))
