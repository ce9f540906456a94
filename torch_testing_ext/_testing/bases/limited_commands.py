"""Commands with a time limit, in a session of their own, whose output goes to a file.

`subprocess.run(timeout=...)` kills the command alone: its children go on, and the reason for the delay is lost.
Commands that answer at once and start nothing, such as git, are run by that all the same.
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch_testing_ext._process.ends import describe_exit

Process = subprocess.Popen[bytes]


class CommandEnd(NamedTuple):
    """The end of a command."""

    code: int | None  # None: we ended it
    how: str  # in words


def run_limited(
    command: Sequence[str],
    limit: float,
    environ: Mapping[str, str],
    log: IO[Any] | None,
    end: Callable[[Process], None],
    at_limit: Callable[[Process], None] | None = None,
    cwd: Path | None = None,
) -> CommandEnd:
    """Run a command until it ends, or for `limit` seconds.

    log: a file for its output, or None to print it. end: ends what is left of the command and its processes; it is
    called in any case, also if this process is interrupted. at_limit: is called before, if the command was late.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
        return CommandEnd(code, describe_exit(code))
    except subprocess.TimeoutExpired:
        if at_limit is not None:
            at_limit(process)
        return CommandEnd(None, f"was terminated after {limit:.1f} s, its time limit")
    finally:
        end(process)
