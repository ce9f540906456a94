"""The files that the processes of a unit write on this machine: their output, stacks and lanes, and last messages."""

import codecs
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._collectives.lanes import FILE, RankLane
from torch_testing_ext._process import messages
from torch_testing_ext._process.logs import read_ends
from torch_testing_ext.launch import hang, lane_files

from ..model import RankLog
from ..processes import worker_messages

_RANK_FILE = re.compile(r"rank(\d+)\.(log|stacks)$")


class UnitFiles:
    """The files that the processes of a unit write, read as they grow."""

    def __init__(self, spec: worker_messages.UnitSpec):
        self._spec = spec
        self._read: dict[Path, int] = {}  # how much of each has been read as new
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be written in two parts

    def _new(self, file: Path) -> bytes:
        with suppress(OSError), file.open("rb") as opened:
            opened.seek(self._read.get(file, 0))
            new = opened.read()
            self._read[file] = opened.tell()
            return new
        return b""

    def new_output(self) -> str:
        """The output since the last call, all of it."""
        return self._decoder.decode(self._new(self._spec.log))

    def new_stacks(self) -> str:
        """The stacks that its process and its ranks have written since the last call."""
        files = [self._spec.stacks, *sorted(self._spec.ranks.glob("*/rank*.stacks"))]
        processes = ["the test's process", *(file.stem for file in files[1:])]  # a rank's file is named after its rank
        found = (
            (process, hang.tidy(self._new(file).decode(errors="replace")))
            for process, file in zip(processes, files, strict=True)
        )
        return "\n\n".join(f"{process}:\n{new}" for process, new in found if new)

    def stacks(self) -> str:
        """All that the unit's own process has written of its stacks."""
        return hang.tidy(read_ends(self._spec.stacks))

    def output(self, start: int, end: int | None) -> str:
        return read_ends(self._spec.log, start, end)

    def rank_logs(self, directories: Iterable[str]) -> tuple[RankLog, ...]:
        """The logs and stacks of each rank, from all directories with files of ranks of one test."""
        found: defaultdict[tuple[int, str], str] = defaultdict(str)  # by the rank and the end of the file's name
        lanes: dict[int, RankLane] = {}
        for directory in directories:
            for file in sorted((self._spec.ranks / directory).rglob(FILE)):
                lanes |= {lane.rank: lane for lane in lane_files.read(file)}
            for file in sorted((self._spec.ranks / directory).rglob("rank*")):
                if match := _RANK_FILE.match(file.name):
                    found[int(match[1]), match[2]] += read_ends(file)
        return tuple(
            RankLog(rank, found[rank, "log"], hang.tidy(found[rank, "stacks"]), lanes.get(rank))
            for rank in sorted({*lanes, *(rank for rank, _ in found)})
        )

    def message_left(self) -> list[worker_messages.FromWorker]:
        """The message that a worker could only leave in a file."""
        if not self._spec.broke.exists():
            return []
        return [messages.from_json(self._spec.broke.read_text(), messages.by_name(worker_messages.WorkerBroke))]

    def remove(self) -> None:
        shutil.rmtree(self._spec.directory, ignore_errors=True)
