"""A copy of the project as it is in the working tree."""

import shutil
from pathlib import Path


def copy_source(root: Path, copy: Path) -> None:
    """Copy what git could track. The rest is being written meanwhile, by other tests."""
    ignored = [line.rstrip("/") for line in Path(root, ".gitignore").read_text(encoding="utf-8").split()]
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
