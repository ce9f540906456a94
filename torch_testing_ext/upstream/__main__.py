"""`python -m torch_testing_ext.upstream`: the commands, and how a user's mistake is said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .mapping import Mistake, installed_torch


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

    bring = commands.add_parser("import", help="bring test files of PyTorch's here, their imports rewritten")
    bring.add_argument("files", type=Path, nargs="+", metavar="FILE")
    bring.add_argument("--to", type=Path, default=Path("test"), help="our directory of tests (default: test/)")
    bring.add_argument("--force", action="store_true", help="overwrite files that differ")
    bring.set_defaults(command=_import)

    patch = commands.add_parser("patch", help="make a patch for a PyTorch checkout out of test files of ours")
    patch.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT")
    patch.add_argument("files", type=Path, nargs="*", metavar="FILE", help="default: those in test/ that it has too")
    patch.add_argument("-o", "--output", type=Path, metavar="OUT", help="where to write it (default: stdout)")
    patch.add_argument("--subject", help="the patch's subject line")
    what = patch.add_mutually_exclusive_group()
    what.add_argument("--vendor", action="store_true", help="append what exists only here to PyTorch's helper modules")
    what.add_argument("--check", action="store_true", help="write nothing: only tell whether the files are fit to go")
    patch.set_defaults(command=_patch)

    coverage = commands.add_parser("coverage", help="which names of PyTorch's test kit are here, lacking, refused")
    coverage.add_argument("--pytorch", type=Path, metavar="CHECKOUT", help="default: the installed torch")
    form = coverage.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all names, as JSON")
    form.add_argument("--write", type=Path, metavar="DIR", help="write the page and the data there")
    coverage.set_defaults(command=_coverage)
    return parser


# Each command's room is imported by it alone: help and mistakes are answered at once.


def _run(options: argparse.Namespace) -> int:
    from . import running

    running.run(options.path, options.arguments, options.explain)
    return 0


def _import(options: argparse.Namespace) -> int:
    from . import importing

    lacking = False
    for one in importing.bring(options.files, options.to, options.force):
        print(f"{one.file} -> {one.target}")
        for remark in one.remarks():
            print(f"{one.file}: {remark}", file=sys.stderr)
            lacking = True
    return 1 if lacking else 0


def _patch(options: argparse.Namespace) -> int:
    from . import patching

    patching.check_checkout(options.pytorch)
    files = options.files or patching.common_files(Path("test"), options.pytorch)
    ready = [patching.outgoing(file, options.pytorch) for file in files]
    for note in (note for one in ready for note in one.notes):
        print(note, file=sys.stderr)
    refused = [refusal for one in ready for refusal in one.refused]
    contents = {one.path: one.source for one in ready}
    if options.vendor:
        from . import vendoring

        contents |= vendoring.appended([refusal.name for refusal in refused], options.pytorch)
    elif refused:
        print("\n".join(map(str, refused)), file=sys.stderr)
        print("Not fit to go as it is; --vendor takes such names along where it can.", file=sys.stderr)
        return 1
    if options.check:
        print(f"fit to go: {', '.join(str(one.path) for one in ready)}")
        return 0
    made = patching.make(contents, options.pytorch, options.subject)
    if not made:
        print("nothing to send: the checkout has these files as they are here", file=sys.stderr)
    if options.output is None:
        sys.stdout.buffer.write(made)
    else:
        options.output.write_bytes(made)
    return 0


def _coverage(options: argparse.Namespace) -> int:
    from . import coverage

    root = options.pytorch or installed_torch()
    measured, version = coverage.measure(root), coverage.version_of(root)
    if options.write is not None:
        coverage.write(measured, version, options.write)
    else:
        print(coverage.as_json(measured, version) if options.json else coverage.as_table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
