"""The files that the processes of a unit write on this machine."""

from __future__ import annotations

import codecs
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._collectives.lanes_of_ranks import LANES_FILE, RankLane
from torch_testing_ext._process import messages
from torch_testing_ext._process.logs import read_ends
from torch_testing_ext.launch import hang
from torch_testing_ext.launch.watching import rank_lanes
from torch_testing_ext.runner.model import RankLog
from torch_testing_ext.runner.processes import unit_spec, worker_messages

_RANK_FILE = re.compile(r"rank(\d+)\.(log|stacks)$")


class UnitFiles:
    """The files that the processes of a unit write, read as they grow."""

    def __init__(self, spec: unit_spec.UnitSpec):
        self.spec = spec
        # The length of each that has been read as new.
        self._read: dict[Path, int] = {}
        # A character may be written in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _new(self, file: Path) -> bytes:
        with suppress(OSError), file.open("rb") as opened:
            opened.seek(self._read.get(file, 0))
            new = opened.read()
            self._read[file] = opened.tell()
            return new
        return b""

    def new_output(self) -> str:
        """The output since the last call, all of it."""
        return self._decoder.decode(self._new(self.spec.log))

    def new_stacks(self) -> str:
        """The stacks that its process and its ranks have written since the last call."""
        files = [("the test's process", self.spec.stacks)]
        for file in sorted(self.spec.ranks.glob("*/rank*.stacks")):
            # A rank's file is named after its rank.
            files.append((file.stem, file))
        parts = []
        for process, file in files:
            new = hang.without_harness(self._new(file).decode(errors="replace"))
            if new:
                parts.append(f"{process}:\n{new}")
        return "\n\n".join(parts)

    def stacks(self) -> str:
        """All that the unit's own process has written of its stacks."""
        written = read_ends(self.spec.stacks)
        return hang.without_harness(written) if written else ""

    def output(self, start: int, end: int | None) -> str:
        return read_ends(self.spec.log, start, end)

    def rank_logs(self, directories: Iterable[str]) -> tuple[RankLog, ...]:
        """The logs and stacks of each rank, from all directories with files of ranks of one test."""
        # The texts by rank and end of the file's name.
        texts: defaultdict[tuple[int, str], str] = defaultdict(str)
        lanes: dict[int, RankLane] = {}
        for directory in directories:
            folder = self.spec.ranks / directory
            for file in sorted(folder.rglob(LANES_FILE)):
                lanes.update((lane.rank, lane) for lane in rank_lanes.read_lanes(file))
            for file in sorted(folder.rglob("rank*")):
                match = _RANK_FILE.match(file.name)
                if match:
                    texts[int(match[1]), match[2]] += read_ends(file)
        ranks = {*lanes, *(rank for rank, _ in texts)}
        logs = []
        for rank in sorted(ranks):
            stacks = hang.without_harness(texts[rank, "stacks"])
            logs.append(RankLog(rank, texts[rank, "log"], stacks, lanes.get(rank)))
        return tuple(logs)

    def message_left(self) -> list[worker_messages.FromWorker]:
        """The message that a worker could only leave in a file."""
        if not self.spec.broke.exists():
            return []
        kinds = messages.by_name(worker_messages.WorkerBroke)
        return [messages.from_json(self.spec.broke.read_text(), kinds)]

    def remove(self) -> None:
        shutil.rmtree(self.spec.directory, ignore_errors=True)
