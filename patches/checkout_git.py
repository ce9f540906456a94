"""Runs git in a checkout, by itself."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from torch_testing_ext.upstream.mapping import UserError


def run_git(words: Sequence[str], directory: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in a directory, which does not count as part of a repository above it."""
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent)}
    # The user's git configuration must not affect what it does.
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.attributesFile=", *words]
    try:
        return subprocess.run(command, cwd=directory, input=stdin, capture_output=True, env=alone, check=False)
    except FileNotFoundError:
        raise UserError("this command needs git, which is not on PATH") from None
