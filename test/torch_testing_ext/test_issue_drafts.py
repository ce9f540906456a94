"""The drafts of issues in patches/issues: each patch has one, whose program shows the fault with torch alone.

This file imports what the programs need, so that their ranks do not.

A program is wrong where it ends with its own assertion, or with an error that its draft quotes in an indented line. Its
first line says how many ranks run it.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed as dist
import torch.distributed.pipelining
import torch.distributed.tensor
from kit.found_bugs import FIXED, RAISED_BEFORE, imports_of, repaired
from kit.ranks import OneRank

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, timeout

PATCHES = Path(__file__).parents[2] / "patches"
OFFERS = sorted(f"offers/{file.stem}" for file in (PATCHES / "issues" / "offers").glob("*.md"))
FILES = {file.stem: file for folder in ("issues", "old/issues") for file in (PATCHES / folder).glob("*.md")}
DRAFTS = sorted(FILES)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^    (\S.*)$", re.MULTILINE)
PAGE = re.compile(r"docs/found/(\w+)\.py")
RANKS = re.compile(r"# torchrun --nproc-per-node (\d) repro\.py\n")
DEADLINE = 120.0


class Draft:
    """The draft of an issue."""

    def __init__(self, name):
        file = FILES.get(name, PATCHES / "issues" / f"{name}.md")
        self.text = file.read_text(encoding="utf-8")
        [self.program] = PROGRAM.findall(self.text)
        self.quoted = QUOTED.findall(self.text.replace(self.program, ""))
        page = PAGE.search(self.text)
        self.page = page[1] if page else None
        ranks = RANKS.match(self.program)
        self.ranks = int(ranks[1]) if ranks else 1

    @property
    def about_the_kit(self):
        """Whether the program is a test file, which runs in an interpreter of its own."""
        return "torch.testing._internal" in self.program

    @property
    def is_fixed(self):
        return self.page in FIXED

    def explains(self, error):
        """Whether an error is the one that the draft describes."""
        if torch.__version__ < RAISED_BEFORE.get(self.page, (0, 0)):
            return True
        return error.startswith("AssertionError") or any(text in error for text in self.quoted)


class TestIssueDrafts(OneRank):
    """Each program runs in a rank that has imported torch already, and forks the ranks that it needs."""

    def test_every_patch_has_a_draft_of_its_own(self):
        slugs = {file.name.partition(".")[0] for file in PATCHES.rglob("*.patch")}
        self.assertEqual(set(DRAFTS), slugs)

    def test_programs_are_short_and_need_torch_alone(self):
        for name in (*DRAFTS, *OFFERS):
            with self.subTest(name):
                program = Draft(name).program
                self.assertLessEqual(sum(map(bool, program.splitlines())), 15)
                self.assertLessEqual(imports_of(program) - sys.stdlib_module_names, {"torch"})
                self.assertTrue("assert" in program or Draft(name).quoted)

    @unittest.skipIf(torch.cuda.is_available(), "what offers say of CUDA's default is right here")
    def test_offers_show_what_they_would_find(self):
        """They have no patch, and need no rank."""
        self.assertEqual(len(OFFERS), 1)
        for name in OFFERS:
            with self.subTest(name), self.assertRaises(AssertionError):
                exec(Draft(name).program, {})

    @parametrize("name", [name for name in DRAFTS if not Draft(name).about_the_kit])
    def test_program(self, name):
        draft = Draft(name)
        errors = run_ranks(draft.program, draft.ranks)
        if draft.is_fixed:
            lacking = [error for error in errors if error.startswith("NotImplementedError")]  # by an older torch
            self.assertEqual(errors, lacking)
        elif not errors:
            repaired(f"has not the bug of patches/issues/{name}.md")
        else:
            self.assertTrue(any(map(draft.explains, errors)), errors)

    @pytest.mark.slow
    @timeout(300)
    @parametrize("name", [name for name in DRAFTS if Draft(name).about_the_kit])
    def test_program_about_the_kit(self, name):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "repro.py")
            file.write_text(Draft(name).program)
            # PyTorch's test classes leave files there.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder}
            ran = subprocess.run(
                [sys.executable, file], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
            )
        if ran.returncode == 0:
            repaired(f"has not the bug of patches/issues/{name}.md")
        self.assertRegex(ran.stderr, r"\n    assert .*\n( +\^+\n)?AssertionError(: .*)?\n\Z")


def run_ranks(program, ranks):
    """The errors with which ranks ended. After the first one, the other ranks, which may wait for it, are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        pids = [fork(program, rank, ranks, store.port, file) for rank, file in enumerate(files)]
        deadline = time.monotonic() + DEADLINE
        running = set(pids)
        while running:
            ended = {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            running -= ended
            if not ended:
                time.sleep(0.01)
            if any(file.exists() for file in files) or time.monotonic() > deadline:
                for pid in running:
                    os.kill(pid, 9)
        return [file.read_text() for file in files if file.exists()]


def fork(program, rank, ranks, port, errors):
    pid = os.fork()
    if pid == 0:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ.update(agent, MASTER_ADDR="127.0.0.1")
        # Ranks that are killed leave files.
        tempfile.tempdir = str(errors.parent)
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException as error:
            partial = errors.with_suffix(".part")
            partial.write_text(f"{type(error).__name__}: {error}")
            partial.rename(errors)
        os._exit(0)
    return pid


instantiate_parametrized_tests(TestIssueDrafts)

if __name__ == "__main__":
    run_tests()
