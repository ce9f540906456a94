"""`python -m torch_testing_ext.upstream`: the commands, and how a user's mistake is said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .mapping import Mistake


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        code: int = options.command(options)
    except Mistake as mistake:
        print(f"{_PROGRAM}: {mistake}", file=sys.stderr)
        return 2
    return code


_PROGRAM = "python -m torch_testing_ext.upstream"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="The way to and from a PyTorch checkout.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a test file of PyTorch's as it is, on our classes")
    run.add_argument("--explain", action="store_true", help="list what came from PyTorch in the end")
    run.add_argument("path", type=Path, metavar="PATH")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="unittest's arguments")
    run.set_defaults(command=_run)
    return parser


# Each command's room is imported by it alone: help and mistakes are answered at once.


def _run(options: argparse.Namespace) -> int:
    from . import running

    running.run(options.path, options.arguments, options.explain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
