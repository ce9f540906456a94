"""The entry point of run_test.py. Imports that --help does not need happen where they are needed."""

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
    """Runs run_test.py and returns its exit code. `root` is the project's folder."""
    try:
        code = _execute(config.read_options(argv, os.environ, root, Path.cwd()), root)
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
    except BrokenPipeError:  # the reader of the output is gone, as in `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OUR_ERROR
    except Exception:
        traceback.print_exc()
        print("run_test.py: internal error; this is not a test failure", file=sys.stderr)
        return ExitCode.OUR_ERROR


def _execute(configured: ConfiguredOptions, root: Path) -> int:
    if configured.options.action is Action.SHOW_CONFIG:
        print(config.show(configured))
        return ExitCode.PASSED
    from .session import Session

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM interrupts like Ctrl-C
    return Session(configured.options, configured.options.drop_in_root or root).run()
