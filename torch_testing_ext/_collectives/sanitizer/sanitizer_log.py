"""The log of a rank: one file that the rank maps into its memory, and that the parent reads while the rank runs.

It has one writer, which needs no lock of the file, and it outlives the rank however that ends. The header has a count
and a rolling hash for each group, so that ranks that agree need not be compared call by call. Texts, such as what was
called and where, are written once; a record has only their numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.records.issued_calls import (
    Call,
    CallInGroup,
    GroupRecord,
    RankRecord,
    make_record,
    raised_for,
)
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import grouped

from .log_headers import (
    COUNT,
    EVENTS,
    FIRST_SLOT,
    GROUPS,
    HEADER,
    IRREGULAR,
    LOST,
    MEMORY,
    NOTES,
    P2P,
    SLOTS,
    TEXTS,
    TEXTS_END,
    VERSION,
    numbers_of,
)

_MAGIC = 0x746F7263_68737A31
_TEXTS_AT = 8 * HEADER
_RECORDS_AT = _TEXTS_AT + (1 << 20)
_RECORD = struct.Struct("<QHHIII")
MOST_RECORDS = 40_000
_SIZE = _RECORDS_AT + MOST_RECORDS * _RECORD.size
_LENGTH = struct.Struct("<I")
# The group of an operation that is not compared.
NO_GROUP = 0xFFFF
# The number in the note of a wait for all that the rank has issued.
ALL = -1
_RAISED, _NOTE, _GROUP, _ERROR, _WAIT = 1, 2, 4, 8, 16
_MOST_ERRORS = 1000
_IS_EVENT = "is_event"
# Taken before a test could replace it.
_now_ns = time.time_ns
_DEFAULTS = {field.name: field.default for field in fields(Call)}
_BACKEND = "c10d"


def text_of(call: Call) -> str:
    """A call as it is written, in JSON, without the fields that have their default."""
    written = {name: value for name, value in vars(call).items() if value != _DEFAULTS[name]}
    return json.dumps(written)


class LogWriter:
    """The rank's side. It keeps no descriptor, so that no test can close one."""

    def __init__(self, path: Path, most: int = MOST_RECORDS):
        self._most = most
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A page that a full disk cannot back would end the rank by SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, _SIZE)
            else:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
            if hasattr(mmap, "MADV_RANDOM"):
                # Else the first write may zero all of it, which takes 0.5 ms.
                self._map.madvise(mmap.MADV_RANDOM)
        finally:
            os.close(fd)
        self._numbers = memoryview(self._map).cast("Q")
        self._texts: dict[str, int] = {}
        self._count = 0
        self._errors = 0
        self._lock = threading.RLock()
        self._slots: dict[int, tuple[int, int]] = {}
        self._threads = itertools.count()
        self._of_thread = threading.local()
        self._numbers[VERSION] = _MAGIC

    def text(self, text: str) -> int:
        """The number of a text, which is written if it is new; 0 if there is no more space."""
        number = self._texts.get(text)
        return self._write_text(text) if number is None else number

    def _write_text(self, text: str) -> int:
        data = text.encode()
        at = _TEXTS_AT + self._numbers[TEXTS_END]
        start = at + _LENGTH.size
        end = start + len(data)
        if end > _RECORDS_AT:
            self._numbers[LOST] += 1
            return 0
        _LENGTH.pack_into(self._map, at, len(data))
        self._map[start:end] = data
        number = self._texts[text] = len(self._texts) + 1
        self._numbers[TEXTS_END] = end - _TEXTS_AT
        self._numbers[TEXTS] = number
        return number

    def issue(self, group: int, what: int, agreement: bytes | None, site: int) -> int:
        """Record an operation; returns its number, or -1 if the log is full. `agreement`: None for p2p."""
        number = self._add(group, 0, what, site, self._thread())
        if agreement is None:
            self._numbers[P2P] += 1
        elif group < SLOTS:
            count, digest = self._slots.get(group, (0, 0))
            count, digest = count + 1, zlib.crc32(agreement, digest)
            self._slots[group] = count, digest
            self._numbers[FIRST_SLOT + group] = count << 32 | digest
        elif group != NO_GROUP:
            self._numbers[IRREGULAR] = 1
        return number

    def _thread(self) -> int:
        """The number of this thread. A later thread with the same identifier has another one."""
        number: int | None = getattr(self._of_thread, "number", None)
        if number is None:
            number = self._of_thread.number = next(self._threads)
        return number

    def _add(self, group: int, flags: int, what: int, site: int, thread: int = 0) -> int:
        with self._lock:
            number = self._count
            if number >= self._most:
                self._numbers[LOST] += 1
                return -1
            # First: a signal's handler may add another in between.
            self._count = number + 1
            at = _RECORDS_AT + number * _RECORD.size
            _RECORD.pack_into(self._map, at, _now_ns(), group, flags, what, site, thread)
            self._numbers[COUNT] = self._count
        return number

    def raised(self, number: int) -> None:
        """An operation has raised, and was not issued."""
        if number >= 0:
            self._map[_RECORDS_AT + number * _RECORD.size + 10] |= _RAISED
        self._numbers[IRREGULAR] = 1
        self.error_now()

    def error_now(self) -> None:
        """A function of torch.distributed has raised."""
        self._errors += 1
        if self._errors <= _MOST_ERRORS:
            self._add(0, _ERROR, 0, 0)

    def wait(self, number: int, site: int) -> None:
        """The rank waits for an operation by its number, or for all that it has issued: ALL."""
        self._add(NO_GROUP, _WAIT, number + 1, site, self._thread())

    def add_group(self, group: GroupRecord, site: int = 0) -> None:
        """The rank has made a group, which has the next number."""
        self._add(0, _GROUP, self.text(json.dumps(astuple(group))), site)
        self._numbers[GROUPS] = zlib.crc32(group.name.encode(), self._numbers[GROUPS])

    def note(self, fields: dict[str, Any], site: int = 0) -> None:
        """Write down something that the rank has found by itself."""
        self._add(0, _NOTE, self.text(json.dumps(fields)), site)
        self._numbers[NOTES] += 1

    def site(self, site: Site) -> int:
        """The number of a line of the program."""
        return self.text(json.dumps(list(site)))

    def memory(self, most: int) -> None:
        """Write down the most bytes of tensors that the rank had at once."""
        self._numbers[MEMORY] = most

    def event(self, fields: dict[str, Any]) -> None:
        """Write down something of the test's faults: one that happens now, or a name that was reached."""
        self._add(0, _NOTE, self.text(json.dumps({_IS_EVENT: True, **fields})), 0)
        self._numbers[EVENTS] += 1


@dataclass(frozen=True)
class HostWait:
    """The rank goes on only when an operation is over, or all that it has issued: ALL. `order`: as of calls."""

    order: int
    awaited: int
    site: Site | None


@dataclass
class LogContent:
    """All that a rank has written so far."""

    groups: list[GroupRecord] = field(default_factory=list)
    # The lines that have made them, where those are known.
    sites: list[Site | None] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    issued: list[CallInGroup] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = True
    # Those of earlier processes of the rank, whose names count.
    earlier: list[GroupRecord] = field(default_factory=list)

    def record(self, rank: int) -> RankRecord:
        first = len(self.earlier)
        issued = (
            [call if call.group is None else call._replace(group=first + call.group) for call in self.issued]
            if first
            else self.issued
        )
        return make_record(rank, [*self.earlier, *self.groups], issued, self.is_whole, first=first)


class _Texts:
    """The texts of a log, each read once."""

    def __init__(self, texts: list[str]):
        self._texts = texts
        self._fields: dict[int, Any] = {}
        self._calls: dict[int, Call] = {}
        self._sites: dict[int, Site] = {}

    def fields(self, number: int) -> Any:
        """A group or a note."""
        if number not in self._fields:
            self._fields[number] = json.loads(self._texts[number - 1])
        return self._fields[number]

    def call(self, number: int) -> Call:
        if number not in self._calls:
            call: Call = messages.decode(Call, self.fields(number))
            self._calls[number] = replace(call, agreement=_frozen(call.agreement))
        return self._calls[number]

    def site(self, number: int) -> Site | None:
        """A line of the program; None for the number 0."""
        if number and number not in self._sites:
            self._sites[number] = Site(*json.loads(self._texts[number - 1]))
        return self._sites.get(number)


def _frozen(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tuples of tuples instead of JSON's lists, so that calls can be told apart by them."""
    return tuple(_frozen(tuple(value)) if isinstance(value, list) else value for value in values)


class LogReader:
    """The parent's side: reads the log of a rank that may still be writing."""

    def __init__(self, path: Path):
        self._path = path

    def remove(self) -> None:
        """Remove the file. A rank that still has it may go on to write."""
        with suppress(OSError):
            self._path.unlink()

    def _part(self, start: int, size: int) -> bytes:
        """A part of the file; b"" if that is not there."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, start)
        except OSError:
            return b""

    def header(self) -> bytes:
        """The header as it is; b"" if the rank has not begun its log."""
        data = self._part(0, _TEXTS_AT)
        return data if len(data) == _TEXTS_AT else b""

    def count_of_events(self) -> int:
        """The number of events of faults that the rank has written."""
        (header,) = numbers_of([self.header()]) or [()]
        return header[EVENTS] if header else 0

    def memory(self) -> int:
        """The most bytes of tensors that the rank had at once; 0 if it has not said."""
        (header,) = numbers_of([self.header()]) or [()]
        return header[MEMORY] if header else 0

    def times(self) -> list[float]:
        """The times of all records, in seconds since 1970."""
        (header,) = numbers_of([self.header()]) or [()]
        count = header[COUNT] if header else 0
        return [at / 1e9 for at, *_ in _RECORD.iter_unpack(self._part(_RECORDS_AT, count * _RECORD.size))]

    def read(self) -> LogContent | None:
        """All that has been written; None if there is no log."""
        (header,) = numbers_of([self.header()]) or [()]
        if not header or header[VERSION] != _MAGIC:
            return None
        records = list(_RECORD.iter_unpack(self._part(_RECORDS_AT, header[COUNT] * _RECORD.size)))
        texts = _Texts(self._texts())
        calls = [number for number, record in enumerate(records) if _is_call(record)]
        raised = _raised(records)
        content = LogContent(is_whole=not header[LOST])
        for number, (_, group, flags, what, site, thread) in enumerate(records):
            if flags & _WAIT:
                content.waits.append(HostWait(number, what - 1, texts.site(site)))
                continue
            if not what:
                # Its text is lost, or it has none.
                continue
            if flags & _GROUP:
                content.groups.append(_group_of(texts.fields(what)))
                content.sites.append(texts.site(site))
            elif flags & _NOTE:
                note = texts.fields(what)
                if _IS_EVENT in note:
                    content.events.append(note)
                    continue
                issued = texts.site(note.get("issued") or 0)
                content.notes.append({**note, "site": texts.site(site), "issued": issued, "record_id": number})
            elif not flags & _RAISED or number == calls[-1]:
                # The latest call counts although it has raised: the rank wanted to issue it, and may have lost its
                # peer. It does not wait, so it counts as over.
                is_over = bool(flags & _RAISED)
                call = replace(
                    texts.call(what),
                    order=number,
                    site=texts.site(site),
                    raised=number in raised,
                    thread=thread,
                    is_over=is_over,
                    tells_end=is_over,
                )
                content.issued.append(CallInGroup(call, None if group == NO_GROUP else group, _BACKEND))
        return content

    def digest(self) -> tuple[bytes, list[GroupRecord]]:
        """A digest of all that has been written, but for times and the members of groups, and these groups."""
        (header,) = numbers_of([self.header()])
        data = self._part(_RECORDS_AT, header[COUNT] * _RECORD.size)
        texts = self._texts()
        groups = [what for _, _, flags, what, _, _ in _RECORD.iter_unpack(data) if flags & _GROUP and what]
        made = [_group_of(fields) for fields in map(_Texts(texts).fields, groups)]
        for number in groups:
            texts[number - 1] = ""
        # A record begins with its time.
        records = b"".join(data[at + 8 : at + _RECORD.size] for at in range(0, len(data), _RECORD.size))
        whole = hashlib.sha256(records)
        whole.update("\0".join([str(header[LOST]), *texts]).encode())
        return whole.digest(), made

    def _texts(self) -> list[str]:
        (header,) = numbers_of([self.header()])
        area = self._part(_TEXTS_AT, header[TEXTS_END])
        texts = []
        at = 0
        while at < len(area):
            (length,) = _LENGTH.unpack_from(area, at)
            start = at + _LENGTH.size
            at = start + length
            texts.append(area[start:at].decode())
        return texts


def _group_of(fields: Any) -> GroupRecord:
    name, description, members, *others = fields
    return GroupRecord(name, description, tuple(members), *others)


def _is_call(record: tuple[int, ...]) -> bool:
    _, _, flags, *_ = record
    return not flags & (_NOTE | _GROUP | _ERROR | _WAIT)


def _raised(records: list[tuple[int, ...]]) -> set[int]:
    """The calls after which something has raised."""
    errors = [number for number, (_, _, flags, *_) in enumerate(records) if flags & _ERROR]
    if not errors:
        return set()
    # The order of the records is that of the times.
    calls = grouped((record[1], (number, number)) for number, record in enumerate(records) if _is_call(record))
    return {number for in_group in calls.values() for number in raised_for(in_group, errors)}
