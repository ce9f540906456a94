"""Every command in a block of a users' page runs as it stands, in an empty folder with the files of that page.

test_newcomer.py follows README.md and "Get started" from the top, and compares what their commands print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.files import write
from kit.processes import ROOT
from kit.terminals import Terminal
from kit.walkthrough import COMMAND as TYPED, Walkthrough

DOCS = ROOT / "docs"
FOLDERS = ("guides", "reference", "migrate", "help")
# test_newcomer.py follows their blocks with outputs.
NEWCOMER = [ROOT / "README.md", *sorted((DOCS / "get-started").glob("*.md"))]
PAGES = [*NEWCOMER, *sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Without `file:`, a test that fails on purpose.
FILE = re.compile(r"# (?:file: )?(\S+\.py)\n")
PROGRAMS = "torchtest|pytest|python3?|torchrun|srun|salloc|ray|pip|bash"
COMMAND = re.compile(rf"^((?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS}) .*|torchtest))$", re.MULTILINE)
# What one machine without GPUs cannot run, by how it begins, and who runs it.
ELSEWHERE = {
    "pip install": "needs an index: test/wheel",
    "python3 -m venv": "needs an index: .ci/run",
    "torchtest --gpus": "needs GPUs",
    "torchtest --ranks-per-gpu": "needs a GPU",
    "ray start": "runner/cluster",
    "torchtest --cluster": "runner/cluster",
    "salloc ": "runner/cluster",
    "torchrun --nnodes=2": "needs two machines",
    "MASTER_ADDR=HOST": "needs two machines",
    "python benchmarks/": "takes minutes",
    "bash benchmarks/": "needs a GPU",
    "torchtest moving": "needs the suite of that project: test_moving.py",
    "USE_PYTEST_POOL=1": "needs the suite of that project",
    "torchtest --drop-in ~/pytorch": "needs a checkout of PyTorch: test_drop_in_run.py",
    "pytest --drop-in test/distributed": "needs a checkout of PyTorch: test_drop_in_run.py",
    "python -m torch_testing_ext.upstream": "needs a checkout of PyTorch: upstream",
}
# What a reader of a page has done before.
BEFORE = {
    "faster": "git init -q -b main . && git add . && git -c user.name=r -c user.email=r@example.org commit -q -m all",
    "merge-runs": "for i in 2 3 4; do torchtest --shard $i/4 --run-file shard-$i.ttx; done && "
    "cp shard-2.ttx yesterday.ttx",
    "never-run": "touch known-holes.txt && pytest -q --junitxml results/cpu.xml tests",
    "reports": "pytest -q --junitxml results/cpu.xml tests && torchtest tests --cache cache --run-file shard-1.ttx",
}
# What stands for something of the reader's.
PLACEHOLDERS = {"/runs/RUN": "/runs/*"}
# Pages whose output is that of a longer test, which they do not show.
NOT_COMPARED = ("faults",)

IN_RANKS = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2)
def {name}(dist_env):
    tensor = torch.ones(1, device=dist_env.device)
    dist.all_reduce(tensor)
    dist.barrier()
"""
IN_CLASS = """
import torch
import torch.distributed as dist

import torch_testing_ext
from torch_testing_ext.common_distributed import DistributedTestBase
from torch_testing_ext.common_utils import run_tests


class ReduceTest(DistributedTestBase):
    @property
    def world_size(self):
        return 2

    def test_reduce(self):
        self.create_pg("cpu")
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    run_tests()
"""
LOOP = """
import time

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import DistributedTestBase


class TestLoop(DistributedTestBase):
    @property
    def world_size(self):
        return 3

    def test_hangs(self):
        self.create_pg("cpu")
        dist.all_reduce(torch.ones(1))
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            time.sleep(1000)
"""
# The files that a reader has already.
PROJECT = {
    "tests/test_sum.py": "import unittest\n"
    + IN_RANKS.format(name="test_sum")
    + "\n\nclass SumTest(unittest.TestCase):\n    def test_right(self):\n        pass\n"
    + "\n\ndef test_large():\n    pass\n",
    "tests/tensor/test_mlp.py": "def test_mlp():\n    pass\n",
    "test/test_collectives.py": IN_RANKS.format(name="test_all"),
    "test_x.py": IN_CLASS,
    "test_s.py": IN_RANKS.format(name="test_race"),
    "test_loop.py": LOOP,
}


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    """The commands of a page's blocks, in their order, each with the output that the page shows."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "console" or block.startswith("$ "):
            if page not in NEWCOMER:
                yield from TYPED.findall(block)
        elif not language:
            yield from ((command, "") for command in COMMAND.findall(block))


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """The files that a page shows, each with its name."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python" and (named := FILE.match(block)):
            yield named[1], block


def is_elsewhere(command: str) -> bool:
    return any(command.startswith(beginning) for beginning in ELSEWHERE)


def run_here(page: Path) -> list[tuple[str, str]]:
    return [(command, shown) for command, shown in commands_of(page) if not is_elsewhere(command)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if run_here(page)])
def test_commands(page: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    reader = Walkthrough.in_checkout(tmp_path)
    reader.environ["XDG_RUNTIME_DIR"] = str(runtime)  # where warm servers are
    # torchrun leaves its logs there.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    reader.environ["TMPDIR"] = str(temporary)
    for name, text in [*PROJECT.items(), *files_of(page)]:
        write(reader.folder, name, text)
    if before := BEFORE.get(page.stem):
        done = reader.run(before)
        assert done.returncode == 0, done.stdout + done.stderr
    faults = []
    for command, shown in run_here(page):
        for word, meant in PLACEHOLDERS.items():
            command = command.replace(word, meant)
        if "--pdb" in command or "--trace" in command:
            debug(command, reader)
        elif shown and page.stem not in NOT_COMPARED:
            faults += reader.type(command, shown)
        elif (done := reader.run(command)).returncode != 0:
            faults.append(f"$ {command}\nexit code {done.returncode}:\n{done.stdout}{done.stderr}")
    assert not faults, "\n".join(faults)


def debug(command: str, reader: Walkthrough) -> None:
    """A debugger needs a terminal."""
    terminal = Terminal(120, ["/bin/sh", "-c", command], reader.folder, reader.environ)
    try:
        terminal.press("c\n" * 5)  # typed ahead: pytest stops in each of the tests
        terminal.expect(" passed")
        terminal.expect_end()
    finally:
        terminal.close()


def test_what_is_elsewhere_is_on_a_page() -> None:
    commands = [command for page in PAGES for command, _ in commands_of(page)]
    assert len(commands) > 50
    for beginning in ELSEWHERE:
        assert any(command.startswith(beginning) for command in commands), beginning
    assert {*BEFORE, *NOT_COMPARED} <= {page.stem for page in PAGES}
