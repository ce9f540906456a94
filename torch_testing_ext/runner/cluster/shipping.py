"""The project as one file, to be sent to nodes that do not share its file system."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .cluster_nodes import ClusterError

LARGEST = 2 << 30  # bytes; a project beyond this size is not meant to be sent
MOST_NAMED = 3
MOMENT = 946_684_800  # the time of all files, in 2000: archives such as wheels hold none before 1980
_COMPILED = (".so", ".pyd", ".dylib")
_LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".torch_testing_ext"}


def pack(root: Path, target: Path) -> list[str]:
    """Write a tar of the project: what git lists and untracked files, or without git, all but caches.

    The same files give the same bytes, by which a node recognises a project that it has kept. Returns warnings. Raises
    ClusterError if the project cannot be sent.
    """
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = sorted(_walk(root)) if listed is None else sorted({name for name in listed if _is_there(root / name)})
    size = sum(_size(root / name) for name in files)
    if size > LARGEST:
        raise ClusterError(
            f"{root} cannot be sent to the nodes: it has {size >> 20} MiB, more than {LARGEST >> 20}. "
            "Use --cluster-root with a path on a shared file system, or have git ignore what tests do not need."
        )
    try:
        with tarfile.open(target, "w") as tar:  # symbolic links stay links
            for name in files:
                with suppress(FileNotFoundError):  # gone since it was listed, such as a file of another run
                    tar.add(root / name, name, recursive=False, filter=_without_origin)
    except OSError as error:
        raise ClusterError(f"{root} cannot be sent to the nodes: {error}") from error
    return [] if listed is None else _ignored_extensions(root)


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out what may differ between two checkouts of the same files."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = MOMENT
    return member


def _ignored_extensions(root: Path) -> list[str]:
    ignored = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard") or []
    compiled = [name for name in ignored if name.endswith(_COMPILED) and not _LEFT_OUT.intersection(Path(name).parts)]
    if not compiled:
        return []
    more = f" and {len(compiled) - MOST_NAMED} more" if len(compiled) > MOST_NAMED else ""
    return [
        f"compiled files that git ignores are not sent to the nodes: {', '.join(compiled[:MOST_NAMED])}{more}; "
        "build them there with --cluster-setup, or use --cluster-root"
    ]


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


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            path = Path(folder, name)
            if _is_there(path):
                yield str(path.relative_to(root))
