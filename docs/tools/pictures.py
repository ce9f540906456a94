"""Make the pictures of the documentation: run tests, and keep what the terminal and the browser show.

    python docs/tools/pictures.py [NAME ...]

Needs rich; the pictures of pages need Chromium. Writes docs/pictures/, and prints what each picture takes.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT / "test" / "torch_testing_ext"))

from kit.browser import CHROMIUM, Browser  # noqa: E402

TESTS = Path(__file__).with_name("picture_tests.py")
# Beside tests that run, one for each of several reasons why a test does not.
NEVER_RUN = """\
import pytest
import torch


def test_one():
    pass


@pytest.mark.world_size(8, backend="nccl")
def test_eight_gpus(dist_env):
    pass


def test_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def test_slow_sweep():
    pass


class TestShapes:
    def test_odd(self):
        assert False

    def test_odd(self):
        pass
"""
# All pictures together, in bytes.
MOST = 1_500_000
COLUMNS, LINES = 100, 30
LONGEST = 120.0
_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b\][^\x07]*\x07")
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Screen:
    """What a terminal shows of the text that it gets: enough of ECMA-48 for rich's displays."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        # A sequence may come in two parts.
        cut = text.rfind("\x1b")
        self._rest = text[cut:] if cut >= 0 and not _CONTROL.match(text, cut) else ""
        text = text[: len(text) - len(self._rest)]
        place = 0
        while place < len(text):
            if match := _CONTROL.match(text, place):
                self._control(match[1] or "", match[2] or "")
                place = match.end()
            else:
                self._print(text[place])
                place += 1

    def _print(self, character: str) -> None:
        if character == "\n":
            self._row, self._column = self._row + 1, 0
        elif character == "\r":
            self._column = 0
        elif character >= " ":
            line = self._line()
            line += [(" ", Style())] * (self._column + 1 - len(line))
            line[self._column] = character, self._style
            self._column += 1
        self._line()

    def _line(self) -> list[tuple[str, Style]]:
        while len(self.lines) <= self._row:
            self.lines.append([])
        return self.lines[self._row]

    def _control(self, numbers: str, letter: str) -> None:
        parts = [int(part) for part in numbers.split(";") if part.isdigit()]
        first = parts[0] if parts else 0
        if letter == "A":
            self._row = max(0, self._row - max(first, 1))
        elif letter == "B":
            self._row += max(first, 1)
        elif letter == "H":
            self._row, self._column = max(first, 1) - 1, (parts[1] if len(parts) > 1 else 1) - 1
        elif letter == "K":
            del self._line()[0 if first == 2 else self._column :]
        elif letter == "J":
            if first == 2:
                self.lines = [[]]
            else:
                del self.lines[self._row + 1 :]
                del self._line()[self._column :]
        elif letter == "m":
            self._change_style(parts or [0])

    def _change_style(self, numbers: list[int]) -> None:
        for number in numbers:
            if number == 0:
                self._style = Style()
            elif number in (1, 2, 3, 4):
                names = {1: "bold", 2: "dim", 3: "italic", 4: "underline"}
                self._style += Style.parse(names[number])
            elif 30 <= number <= 37 or 90 <= number <= 97:
                bright = "bright_" if number >= 90 else ""
                self._style += Style(color=bright + _COLORS[number % 10])
            elif number == 39:
                self._style += Style(color="default")

    def __str__(self) -> str:
        return "\n".join("".join(character for character, _ in line).rstrip() for line in self.lines)

    def text(self) -> Text:
        """The screen for rich, without empty lines at its end."""
        shown = Text()
        lines = self.lines[: len(str(self).rstrip().split("\n"))]
        for line in lines:
            for character, style in line:
                shown.append(character, style)
            shown.append("\n")
        return shown


def on_terminal(command: list[str], folder: Path, until: Callable[[str], bool] | None = None) -> Screen:
    """Run a command on a terminal, to its end or until the screen shows what is wanted; then it gets Ctrl-C."""
    screen = Screen()
    environ = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm", "FORCE_COLOR": "1"}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    began = time.monotonic()
    try:
        for text in _chunks(ours):
            screen.feed(text)
            if until is not None and until(str(screen)):
                break
            if time.monotonic() - began > LONGEST:
                raise TimeoutError(f"{command} does not show what the picture is of:\n{screen}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        for _ in _chunks(ours):  # what it prints at its end, so that it can
            pass
        process.wait()
        os.close(ours)
    return screen


def _chunks(terminal: int) -> Iterator[str]:
    while True:
        if not select.select([terminal], [], [], 1.0)[0]:
            yield ""
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the last process has closed the other end
            return
        if not data:
            return
        yield data.decode("utf-8", "replace")


def save_terminal(screen: Text, name: str, title: str) -> None:
    """Write what a terminal shows as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in screen.split("\n"):
        # A terminal breaks a line at its edge, wherever that is.
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)):
            console.print(part, crop=False, overflow="ignore", no_wrap=True)
    # Without a line below it, underscores of the last one are cut off.
    console.print()
    console.save_svg(str(FOLDER / name), title=title, theme=MONOKAI, unique_id=name.partition(".")[0])


class Pictures:
    """The pictures, in a folder with tests. Each method but for helpers makes those that its docstring names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copyfile(TESTS, folder / "test_training.py")
        # As pip makes it, with this name: it is a part of the commands that a run prints.
        command = folder / "bin" / "torchtest"
        command.parent.mkdir()
        command.write_text(f"#!{sys.executable}\nfrom torch_testing_ext.runner.cli import console\nconsole()\n")
        command.chmod(0o755)
        os.environ["PATH"] = os.pathsep.join([str(command.parent), os.environ["PATH"]])
        os.environ["PYTHONPATH"] = str(ROOT)

    def _first_failure(self, change: str) -> None:
        """Write the first test of README.md, with a change before its collective."""
        (source,) = re.findall(r"(?s)```python\n# file: test_first.py\n(.*?)```", (ROOT / "README.md").read_text())
        call = "    dist.all_reduce(tensor)\n"
        (self.folder / "test_first.py").write_text("# file: test_first.py\n" + source.replace(call, change + call))

    def failure(self) -> None:
        """failure.svg: the failure of "Your first failure" in the terminal."""
        self._first_failure("    if dist_env.rank == 2:\n        return\n")
        screen = on_terminal(["torchtest", "-j8", "test_first.py"], self.folder)
        lines = screen.text().split("\n")
        first = next(number for number, line in enumerate(lines) if line.plain.startswith("rank 2"))
        last = next(number for number, line in enumerate(lines) if line.plain.startswith("run again"))
        save_terminal(Text("\n").join(lines[first : last + 1]), "failure.svg", "torchtest test_first.py")

    def live(self) -> None:
        """live.svg: the live display of a run."""
        command = ["torchtest", "-q", "-j8", "test_training.py"]
        screen = on_terminal(command, self.folder, until=lambda text: "test_pipeline[" in text and "/9" in text)
        save_terminal(screen.text(), "live.svg", "torchtest")

    def watch(self) -> None:
        """watch.svg: the page of --watch."""
        command = ["torchtest", "-j8", "--watch", "--warm=off", "test_training.py"]
        screen = on_terminal(command, self.folder, until=lambda text: "· watching" in text)
        save_terminal(screen.text(), "watch.svg", "torchtest --watch")

    def census(self) -> None:
        """census.svg: tests that never run."""
        tests = self.folder / "tests"
        tests.mkdir()
        (tests / "restart_checks.py").write_text("def test_resumes(): pass\n")
        (tests / "test_scaling.py").write_text(NEVER_RUN)
        words = ["-q", "--run-file=night.ttx", "-k", "not slow", "tests"]
        subprocess.run(["torchtest", *words], cwd=self.folder, stdout=subprocess.DEVNULL, check=False)
        screen = on_terminal(["torchtest", "census", "night.ttx", "--tests", "tests"], self.folder)
        save_terminal(screen.text(), "census.svg", "torchtest census night.ttx --tests tests")

    def report(self) -> None:
        """report-light.png: the failure of README.md as a page; report-dark.png, lanes.png, wait-graph.png: others."""
        self._first_failure("    if dist_env.rank == 2: return\n")
        first, page = self.folder / "first.html", self.folder / "report.html"
        for file, html in (("test_first.py", first), ("test_training.py", page)):
            command = ["torchtest", "-q", "-j8", f"--html={html}", file]
            subprocess.run(command, cwd=self.folder, stdout=subprocess.DEVNULL, check=False)
        with Browser() as browser:
            browser.resize(1000, 900)
            browser.scheme("light")
            browser.open(first)
            self._show(browser, "test_all_reduce")
            self._save(browser, "report-light.png", "details.test[open]")
            browser.scheme("dark")
            browser.open(page)
            self._show(browser, "test_early_stop")
            self._save(browser, "report-dark.png", "details.test[open]")
            browser.scheme("light")
            browser.open(page)
            self._show(browser, "test_early_stop")
            self._save(browser, "lanes.png", "details[open] .chart")
            self._show(browser, "test_two_meshes")
            self._save(browser, "wait-graph.png", "details[open] svg.wait-graph")

    def _show(self, browser: Browser, name: str) -> None:
        """Unfold a test, and fold all others."""
        choose = f"test.open = test.querySelector('.name').textContent.includes('{name}')"
        browser.evaluate(f"for (const test of document.querySelectorAll('details.test')) {choose};")

    def _save(self, browser: Browser, name: str, selector: str) -> None:
        (FOLDER / name).write_bytes(browser.screenshot(selector))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python docs/tools/pictures.py")
    known = [name for name in vars(Pictures) if not name.startswith("_")]
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"one of {', '.join(known)}; all unless given")
    names = parser.parse_args().names or known
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext_pictures_") as folder:
        pictures = Pictures(Path(folder))
        for name in names:
            if name == "report" and CHROMIUM is None:
                print("report: Chromium is not installed")
                continue
            getattr(pictures, name)()
    sizes = {file.name: file.stat().st_size for file in sorted(FOLDER.iterdir())}
    print("\n".join(f"{size:>9,}  {name}" for name, size in sizes.items()))
    return int(sum(sizes.values()) > MOST)


if __name__ == "__main__":
    sys.exit(main())
