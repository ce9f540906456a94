"""run_test.py: puts the rooms together. What is not needed for --help is imported where it is needed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .model import ExitCode
from .options import config
from .options.config import ConfiguredOptions
from .options.options import Action, CannotRun, UsageError


def main(argv: Sequence[str], root: Path) -> int:
    """Returns the exit code. `root` is the project's folder."""
    try:
        code = _obey(config.choose(argv, os.environ, root, Path.cwd()), root)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"run_test.py: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except CannotRun as error:
        print(f"run_test.py: {error}", file=sys.stderr)
        return ExitCode.OUR_ERROR
    except KeyboardInterrupt:
        print("run_test.py: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # a list was to be printed, and its reader has seen enough: `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OUR_ERROR
    except Exception:
        traceback.print_exc()
        print("run_test.py: this is an error of its own, not of a test", file=sys.stderr)
        return ExitCode.OUR_ERROR


def _obey(chosen: ConfiguredOptions, root: Path) -> int:
    if chosen.options.action is Action.SHOW_CONFIG:
        print(config.show(chosen))
        return ExitCode.PASSED
    from .session import Session

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to be interrupted is all the same, by whatever
    return Session(chosen.options, chosen.options.drop_in or root).run()
