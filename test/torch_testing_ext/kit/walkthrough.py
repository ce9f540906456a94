"""Follows a page as a reader does: writes its files, makes its changes, types its commands, compares outputs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kit.processes import clean_environ

# A block of code: its language, and its text.
BLOCK = re.compile(r"^```(python|diff|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\S+)\n")
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
# What differs from run to run.
SECONDS = re.compile(r"\d+\.\d+ s\b")


class Walkthrough:
    """A reader in a folder. `commands` counts what he has typed."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.commands = 0
        self._last_file: Path | None = None
        self.environ = dict(environ)

    @classmethod
    def in_checkout(cls, folder: Path) -> Walkthrough:
        """A reader who has the commands of this checkout, in a project of his own."""
        path = os.pathsep.join([str(_commands(folder / "bin")), os.environ["PATH"]])
        project = folder / "project"
        project.mkdir()
        return cls(project, clean_environ(PATH=path))

    def follow(self, page: str) -> list[str]:
        """Do what the page says; return the faults that a reader finds, each with the block that has it."""
        faults = []
        for kind, text in BLOCK.findall(page):
            if kind == "python" and (named := FILE.match(text)):
                self._last_file = self.folder / named[1]
                self._last_file.write_text(text, encoding="utf-8")
            elif kind == "diff":
                if named := FILE.match(text):
                    self._last_file = self.folder / named[1]
                faults += self._change(FILE.sub("", text, count=1))
            elif kind == "console":
                faults += [fault for command, shown in COMMAND.findall(text) for fault in self.type(command, shown)]
        return faults

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the reader's folder."""
        return subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def _change(self, diff: str) -> list[str]:
        """Change the file that the diff names, or that the page showed last."""
        lines = diff.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert self._last_file is not None
        source = self._last_file.read_text(encoding="utf-8")
        if source.count(before) != 1:
            return [f"the lines of this change are not in {self._last_file.name}:\n{diff}"]
        self._last_file.write_text(source.replace(before, after), encoding="utf-8")
        return []

    def type(self, command: str, shown: str) -> list[str]:
        """Run a command; what the page shows must be a part of what it prints, `...` standing for anything."""
        self.commands += 1
        done = self.run(command)
        if printed_as(shown, done.stdout):
            return []
        return [f"$ {command}\nthe page shows:\n{shown}\nit prints:\n{done.stdout}{done.stderr}"]


def printed_as(shown: str, printed: str) -> bool:
    """Is an excerpt of what was printed shown?"""
    parts = [re.escape(part) for part in SECONDS.sub("0.0 s", shown).rstrip("\n").split("...\n")]
    excerpt = r"(?:.*\n)*?".join(parts).replace(re.escape("..."), ".*")
    return re.search(rf"^{excerpt}$", SECONDS.sub("0.0 s", printed), re.MULTILINE) is not None


def _commands(folder: Path) -> Path:
    """The commands that an environment with the package has, in a folder."""
    folder.mkdir()
    torchtest = "import sys\nfrom torch_testing_ext.runner.cli import console\nsys.exit(console())\n"  # as pip makes it
    texts = {"torchtest": f"#!{sys.executable}\n{torchtest}"}
    modules = {
        "python": "",
        "torchrun": "-m torch.distributed.run",
        "pytest": "-m pytest -p torch_testing_ext.pytest_plugin",
    }
    for name, words in modules.items():
        texts[name] = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n'
    for name, text in texts.items():
        file = folder / name
        file.write_text(text)
        file.chmod(0o755)
    return folder
