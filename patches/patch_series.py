"""The patches for PyTorch in this folder: which there are for a version of torch, and proof that each does its work.

`python -m torch_testing_ext.upstream patches` loads this module, which is no part of the package: only a checkout has
the patches.

A patch has a test of its own, which fails before the patch and passes after it. Both runs use a copy of the installed
torch that consists of links, except for the files that the patches change: site-packages is only read. Each run has a
copy of its own, with the patches up to this one applied, so that runs can go side by side.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import checkout_git
import torch_environments
from torch_environments import TorchEnvironment

from torch_testing_ext._process import system
from torch_testing_ext.upstream.mapping import UserError

# A patch without a version is for every torch that has a series; one with versions only for these.
_NAME = re.compile(r"(?P<number>\d{4})-(?P<slug>[a-z0-9-]+?)(\.torch-(?P<torch>\d+\.\d+(\+\d+\.\d+)*))?\.patch")
_RAN = re.compile(r"^Ran (\d+) tests?\b", re.MULTILINE)
_SUBJECT = re.compile(r"^Subject: (.*(?:\n[ \t].*)*)", re.MULTILINE)
TEST_TIMEOUT = 900.0
# What a test file of ours needs in PyTorch, beside the names that it imports: slugs of patches.
NEEDED = {"test/distributed/fsdp/test_fsdp_tp_integration.py": ("fsdp-test-on-cpu",)}
HEARTBEAT = 10.0
# The folder of patches that PyTorch would not take: it has the fix, or the patch is for a release alone.
OLD = "old"


@dataclass(frozen=True)
class SeriesPatch:
    """One patch of the series."""

    file: Path
    number: int
    slug: str

    @property
    def subject(self) -> str:
        found = _SUBJECT.search(self.file.read_text(encoding="utf-8"))
        words = re.sub(r"\s+", " ", found[1]) if found else self.slug
        return words.removeprefix("[PATCH] ")

    @property
    def test(self) -> Path:
        series = self.file.parent.parent if self.file.parent.name == OLD else self.file.parent
        return series / "tests" / f"test_{self.slug.replace('-', '_')}.py"


@dataclass(frozen=True)
class TestRun:
    """The end of the test of a patch."""

    code: int
    ran: int
    output: str
    seconds: float

    __test__ = False

    @property
    def passed(self) -> bool:
        return self.code == 0 and self.ran > 0 and "skipped=" not in self.output

    @property
    def failed(self) -> bool:
        """Whether tests ran and did not pass: they failed, or skipped what the patch lets run.

        A file that cannot be imported proves nothing.
        """
        return self.ran > 0 and not self.passed


def load(directory: Path, version: str, with_old: bool = False) -> tuple[SeriesPatch, ...]:
    """The series for a version of torch, such as "2.13", in order. `with_old`: with those in the folder of old ones."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; name the directory of the patches with --series")
    chosen: dict[str, SeriesPatch] = {}
    for file in _files(directory, with_old):
        match = _NAME.fullmatch(file.name)
        if match is None:
            raise UserError(f"{file}: a patch is named NNNN-its-subject.patch or NNNN-its-subject.torch-X.Y.patch")
        if match["torch"] is None or version in match["torch"].split("+"):
            if match["slug"] in chosen:
                raise UserError(f"{file} and {chosen[match['slug']].file.name} are both for torch {version}")
            chosen[match["slug"]] = SeriesPatch(file, int(match["number"]), match["slug"])
    return tuple(sorted(chosen.values(), key=lambda patch: patch.number))


def numbered(directory: Path, number: str) -> SeriesPatch:
    """The patch of this number, such as "0003", that is to be sent."""
    found = [match for file in _files(directory, with_old=False) if (match := _NAME.fullmatch(file.name))]
    chosen = [match for match in found if match["number"] == number]
    if len(chosen) != 1:
        numbers = ", ".join(match["number"] for match in found) or "none"
        raise UserError(f"{directory} has {len(chosen)} patches with number {number}. These are there: {numbers}")
    return SeriesPatch(directory / chosen[0].string, int(number), chosen[0]["slug"])


def _files(directory: Path, with_old: bool) -> list[Path]:
    folders = (directory, directory / OLD) if with_old else (directory,)
    return sorted((file for folder in folders for file in folder.glob("*.patch")), key=lambda file: file.name)


def others(directory: Path, version: str, with_old: bool = False) -> tuple[str, ...]:
    """The slugs of patches that there are only for other versions of torch."""
    have = {patch.slug for patch in load(directory, version, with_old)}
    matches = (_NAME.fullmatch(file.name) for file in _files(directory, with_old))
    return tuple(dict.fromkeys(match["slug"] for match in matches if match and match["slug"] not in have))


class PatchedTorch:
    """A directory with a package torch that consists of links to another one, except for the files to be changed."""

    def __init__(self, root: Path, package: Path, changed: Iterable[Path]):
        """`changed`: paths of the form torch/..., which need not exist."""
        self.root = root
        self._changed = frozenset(changed)
        self._folders = {parent for path in self._changed for parent in path.parents}
        self._link(package, Path("torch"))

    def _link(self, source: Path, path: Path) -> None:
        target = self.root / path
        if path in self._changed:
            shutil.copy2(source, target)  # with its time, so that its compiled file counts until a patch changes it
        elif path not in self._folders:
            target.symlink_to(source)
        else:
            target.mkdir()
            for entry in source.iterdir():
                self._link(entry, path / entry.name)

    def apply(self, *patches: SeriesPatch) -> None:
        if patches:
            git([str(patch.file.absolute()) for patch in patches], self.root)

    def run(self, test: Path, python: str = sys.executable) -> TestRun:
        """Run a test file with this torch."""
        if not test.is_file():
            raise UserError(f"{test} does not exist: each patch has a test of this name")
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        started = time.monotonic()
        # Not in the current directory: it may hold packages of its own.
        with tempfile.TemporaryDirectory(prefix="torch_testing_ext_patch_") as directory:
            command = [python, str(test.absolute())]
            log = Path(directory, "log")
            with log.open("wb") as file:
                ran = subprocess.Popen(
                    command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
                code = _wait(ran)
            output = log.read_text(errors="replace")
        counts = _RAN.findall(output)
        return TestRun(code, int(counts[-1]) if counts else 0, output, time.monotonic() - started)


def _wait(ran: subprocess.Popen[bytes]) -> int:
    try:
        return ran.wait(TEST_TIMEOUT)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        ran.kill()
        ran.wait()


def git(words: Sequence[str], directory: Path) -> str:
    done = checkout_git.run_git(["apply", "--whitespace=nowarn", *words], directory)
    if done.returncode != 0:
        raise UserError(f"{words[-1]} does not apply:\n{done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def files_of(patch: SeriesPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as nowhere:
        for line in git(["--numstat", str(patch.file.absolute())], Path(nowhere)).splitlines():
            yield Path(line.split("\t")[2])


@contextmanager
def patched_torch(patches: Sequence[SeriesPatch], package: Path) -> Iterator[PatchedTorch]:
    """A copy of the package in which all files of these patches can be changed. No patch is applied yet."""
    changed = [path for patch in patches for path in files_of(patch)]
    if foreign := [str(path) for path in changed if path.parts[0] != "torch"]:
        raise UserError(f"no wheel has {', '.join(foreign)}: patches of the series change files below torch/")
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext_torch_") as directory:
        yield PatchedTorch(Path(directory), package, changed)


@dataclass(frozen=True)
class PatchProof:
    """The runs of a patch's test: they prove it if the test fails before the patch and passes after it."""

    patch: SeriesPatch
    before: TestRun
    after: TestRun

    @property
    def proven(self) -> bool:
        return self.before.failed and self.after.passed

    def __str__(self) -> str:
        what = f"{self.patch.file.name}: {self.patch.test.name}"
        if not self.before.failed:
            state = "passes" if self.before.passed else "could not run"
            return f"{what} {state} before the patch, but must fail\n{self.before.output}"
        if not self.after.passed:
            return f"{what} does not pass after the patch\n{self.after.output}"
        tests = "1 test" if self.after.ran == 1 else f"{self.after.ran} tests"
        before = "skips" if self.before.code == 0 else "fails"
        return f"{what} {before} before, and passes after ({tests}, {self.before.seconds + self.after.seconds:.0f} s)"


def check(
    patches: Sequence[SeriesPatch],
    wanted: Sequence[SeriesPatch],
    package: Path,
    python: str = sys.executable,
    on_heartbeat: Callable[[str], None] = lambda text: None,
) -> Iterator[PatchProof]:
    """Run the test of each wanted patch before and after it, as many at once as there are CPUs.

    Yields each patch's proof when both its runs have ended, and calls on_heartbeat when none has for HEARTBEAT seconds.
    """
    with ThreadPoolExecutor(system.cores()) as pool:
        runs: dict[Future[TestRun], tuple[SeriesPatch, str]] = {}
        for patch in reversed(wanted):  # the tests of the last ones take the longest, and the others fill the gaps
            number = patches.index(patch)
            for when, applied in ("before", patches[:number]), ("after", patches[: number + 1]):
                runs[pool.submit(_run_with, applied, patch, package, python)] = patch, when
        try:
            yield from _proofs(runs, on_heartbeat)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run_with(applied: Sequence[SeriesPatch], patch: SeriesPatch, package: Path, python: str) -> TestRun:
    with patched_torch(applied, package) as torch:
        torch.apply(*applied)
        return torch.run(patch.test, python)


def _proofs(
    runs: dict[Future[TestRun], tuple[SeriesPatch, str]], on_heartbeat: Callable[[str], None]
) -> Iterator[PatchProof]:
    ended: dict[SeriesPatch, dict[str, TestRun]] = {}
    while runs:
        done, _ = wait(runs, HEARTBEAT, FIRST_COMPLETED)
        if not done:
            on_heartbeat(", ".join(f"{patch.slug} ({when})" for run, (patch, when) in runs.items() if run.running()))
        for run in done:
            patch, when = runs.pop(run)
            found = ended.setdefault(patch, {})
            found[when] = run.result()
            if len(found) == 2:
                yield PatchProof(patch, **found)


# -- the command


def main(words: Sequence[str], prog: str) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.description = (
        "List the patches for the installed torch. With --check, apply them to copies of it, and run the test of each "
        "patch before and after, as many tests at once as there are CPUs. Needs git."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="check only patches whose file name contains NAME")
    parser.add_argument("--check", action="store_true", help="run the tests; this takes a few minutes")
    parser.add_argument("--old", action="store_true", help="with what PyTorch has, or what is for an old release")
    parser.add_argument(
        "--torch",
        nargs="+",
        action="extend",
        default=[],
        metavar="TORCH",
        help="use these versions, such as 2.13, of this environment or those beside it, or environments given by path",
    )
    parser.add_argument(
        "--series", type=Path, default=Path("patches"), metavar="DIR", help="the directory (default: patches)"
    )
    return run(parser.parse_args(words))


def run(options: argparse.Namespace) -> int:
    """List or check the patches that the options of the command name. Return the exit code."""
    chosen = [torch_environments.find(word) for word in options.torch] or [torch_environments.this_environment()]
    good = [_patches_for(environment, options) for environment in chosen]
    return 0 if all(good) else 1


def _patches_for(environment: TorchEnvironment, options: argparse.Namespace) -> bool:
    """List or check the patches for one version of torch. Returns whether all is well."""
    version = environment.version
    patches = load(options.series, version, options.old)
    wanted = [patch for patch in patches if not options.names or any(name in patch.file.name for name in options.names)]
    if not wanted:
        raise UserError(f"no patch for torch {version} in {options.series} has such a name")
    good = _check_all(environment, patches, wanted) if options.check else _list(wanted)
    for slug in others(options.series, version, options.old):
        print(f"{slug}: not for torch {version}")
    return good


def _list(wanted: Sequence[SeriesPatch]) -> bool:
    for patch in wanted:
        print(f"{patch.file.name}: {patch.subject}")
    return True


def _check_all(environment: TorchEnvironment, patches: Sequence[SeriesPatch], wanted: Sequence[SeriesPatch]) -> bool:
    print(f"torch {environment.version}, {environment.python}: {len(wanted)} of {len(patches)} patches", flush=True)
    unproven = 0
    proofs = check(patches, wanted, environment.package, environment.python, _show_progress)
    for number, proof in enumerate(proofs, 1):
        print(f"{number}/{len(wanted)} {proof}", flush=True)
        unproven += not proof.proven
    return unproven == 0


def _show_progress(running: str) -> None:
    print(f"running: {running}", file=sys.stderr, flush=True)
