"""The command line of `python -m torch_testing_ext.upstream`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .mapping import UserError, installed_torch


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        code: int = options.command(options)
    except UserError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    return code


_PROGRAM = "python -m torch_testing_ext.upstream"


def _parser() -> argparse.ArgumentParser:
    description = "Run, import and patch the test files of a PyTorch checkout."
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a PyTorch test file unmodified on our classes"))
    _add_import(commands.add_parser("import", help="copy PyTorch test files here and rewrite their imports"))
    _add_patch(commands.add_parser("patch", help="turn our test files into a patch for a PyTorch checkout"))
    _add_patches(commands.add_parser("patches", help="list or check the patches for PyTorch that we keep"))
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = "Run a PyTorch test file unmodified; its imports of PyTorch's test kit give our classes."
    run.add_argument("--explain", action="store_true", help="at the end, list the names that came from PyTorch")
    run.add_argument("path", type=Path, metavar="FILE", help="the test file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments for unittest")
    run.set_defaults(command=_run)


def _add_import(bring: argparse.ArgumentParser) -> None:
    bring.description = "Copy PyTorch test files here, rewrite their imports, and report names that we lack."
    bring.add_argument("files", type=Path, nargs="+", metavar="FILE", help="test files of PyTorch")
    bring.add_argument(
        "--to", type=Path, default=Path("test"), metavar="DIR", help="our test directory (default: test)"
    )
    bring.add_argument("--force", action="store_true", help="overwrite existing files")
    bring.set_defaults(command=_import)


def _add_patch(patch: argparse.ArgumentParser) -> None:
    patch.description = "Rewrite our test files to PyTorch's imports and write a patch for a checkout. Needs git."
    patch.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a PyTorch checkout (only read)")
    patch.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="our test files (default: all in test/ that it has too)"
    )
    patch.add_argument("-o", "--output", type=Path, metavar="OUT", help="write the patch to OUT (default: stdout)")
    patch.add_argument("--subject", metavar="TEXT", help="subject line of the patch")
    mode = patch.add_mutually_exclusive_group()
    mode.add_argument(
        "--vendor", action="store_true", help="append names that exist only here to PyTorch's helper modules"
    )
    mode.add_argument("--check", action="store_true", help="write nothing; report whether the files are ready to send")
    patch.set_defaults(command=_patch)


def _add_patches(patches: argparse.ArgumentParser) -> None:
    patches.description = (
        "List the patches for the installed torch. With --check, apply them to a copy of it, and run the test of each "
        "patch before and after. Needs git."
    )
    patches.add_argument("names", nargs="*", metavar="NAME", help="check only patches whose file name contains NAME")
    patches.add_argument("--check", action="store_true", help="run the tests; this takes some minutes")
    patches.add_argument(
        "--series", type=Path, default=Path("patches"), metavar="DIR", help="the directory (default: patches)"
    )
    patches.set_defaults(command=_patches)


# Each command imports its module only when it runs, so that --help and errors appear at once.


def _run(options: argparse.Namespace) -> NoReturn:
    """Run the file as `python FILE` would, with our test kit in place of PyTorch's. Exits as the file does."""
    from torch_testing_ext._cases import invocation

    from . import drop_in

    path: Path = options.path
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a test file, as in: run test/distributed/test_store.py -v")
    drop_in.install()
    invocation.python_arguments = ["-m", "torch_testing_ext.upstream", "run"]
    sys.argv[:] = [str(path), *options.arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        if options.explain:
            print(drop_in.explain(), file=sys.stderr)
    raise UserError(f"{path} ran no tests: it does not call run_tests() at its end. Run it with pytest instead")


def _import(options: argparse.Namespace) -> int:
    from . import patching

    complete = True
    for imported in patching.import_files(options.files, options.to, options.force):
        print(f"{imported.file} -> {imported.target}")
        for problem in imported.problems():
            print(f"{imported.file}: {problem}", file=sys.stderr)
            complete = False
    return 0 if complete else 1


def _patch(options: argparse.Namespace) -> int:
    from . import patching

    patching.check_checkout(options.pytorch)
    files = options.files or patching.common_files(Path("test"), options.pytorch)
    prepared = [patching.prepare(file, options.pytorch) for file in files]
    for note in (note for file in prepared for note in file.notes):
        print(note, file=sys.stderr)
    refused = [refusal for file in prepared for refusal in file.refused]
    contents = {file.path: file.source for file in prepared}
    if options.vendor:
        from . import vendoring

        contents |= vendoring.appended([refusal.name for refusal in refused], options.pytorch)
    elif refused:
        print("\n".join(map(str, refused)), file=sys.stderr)
        print("Not ready to send. Use --vendor to include these names where possible.", file=sys.stderr)
        return 1
    if options.check:
        print(f"ready to send: {', '.join(str(file.path) for file in prepared)}")
        return 0
    patch = patching.make_patch(contents, options.pytorch, options.subject)
    if not patch:
        print("nothing to send: the checkout already has these files as they are here", file=sys.stderr)
    if options.output is None:
        sys.stdout.buffer.write(patch)
    else:
        options.output.write_bytes(patch)
    return 0


def _patches(options: argparse.Namespace) -> int:
    from . import patch_series

    package = installed_torch() / "torch"
    version = patch_series.version_of(package)
    patches = patch_series.load(options.series, version)
    wanted = [patch for patch in patches if not options.names or any(name in patch.file.name for name in options.names)]
    if not wanted:
        raise UserError(f"no patch for torch {version} in {options.series} has such a name")
    good = True
    if options.check:
        for line, well in patch_series.check(patches, wanted, package):
            print(line, flush=True)
            good = good and well
    else:
        for patch in wanted:
            print(f"{patch.file.name}: {patch.subject}")
    for slug in patch_series.others(options.series, version):
        print(f"{slug}: not for torch {version}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
