"""Budgets: files that say how often ranks may call each operation in each group, and with how many bytes."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch_testing_ext._process.files import write_atomically
from torch_testing_ext._process.locks import lock
from torch_testing_ext._process.project_settings import read_toml
from torch_testing_ext._process.words import count, grouped

from .issued_calls import GroupRecord
from .rank_facts import RankFacts, bytes_of

_MOST_LINES = 24


class BudgetError(ValueError):
    """A file of budgets that cannot be kept; the message says what to do."""


class Budgeted(NamedTuple):
    """Calls of one operation in one group, and the bytes that they hand over."""

    calls: int
    bytes: int


# The amounts of calls, by group and operation.
Amounts = Mapping[tuple[str, str], Budgeted]


def title_of(group: GroupRecord) -> str:
    """The name of a group in files: it must not depend on how many groups were made before."""
    if group.is_default:
        return "world"
    named = group.description.removeprefix("mesh_")
    return f"{len(group.members)} ranks" if named in ("", "undefined") else named


def amounts_of(facts: RankFacts) -> dict[tuple[str, str], Budgeted]:
    """Add up what a rank has issued."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for group, call in facts.with_groups():
        key = title_of(group), call.kind
        calls[key] += 1
        sizes[key] += bytes_of(call)
    return {key: Budgeted(calls[key], sizes[key]) for key in sorted(calls)}


class Budget:
    """The content of a file of budgets: for each rank of a world, what it may issue."""

    def __init__(self, torch: str, world_size: int, of_ranks: Mapping[int, Amounts], tests: Iterable[str] = ()):
        """`tests`: those that have written it."""
        self.torch = torch
        self.world_size = world_size
        self.of_ranks = dict(of_ranks)
        self.tests = sorted({*tests})

    @classmethod
    def read(cls, path: Path) -> Budget:
        """Read a file. Raises BudgetError."""
        try:
            content = read_toml(path.read_text("utf-8-sig"))
        except FileNotFoundError:
            raise BudgetError(f"there is no budget {path}: write it with --update-budgets") from None
        except (OSError, ValueError) as error:
            raise BudgetError(f"the budget {path} cannot be read: {error}") from None
        try:
            of_ranks: dict[int, Amounts] = {}
            for alike in content["class"]:
                amounts = _amounts_of_rows(alike.get("issued", ()))
                for rank in alike["ranks"]:
                    if of_ranks.setdefault(int(rank), amounts) is not amounts:
                        raise ValueError(f"rank {rank} is in two classes")
            tests = [str(test) for test in content.get("tests", ())]
            return cls(str(content["torch"]), int(content["world_size"]), of_ranks, tests)
        except KeyError as error:
            why = f"lacks {error}"
        except (AttributeError, TypeError, ValueError) as error:
            why = f"has something else than --update-budgets writes ({error})"
        raise BudgetError(f"the budget {path} {why}: write it again with --update-budgets")

    def text(self) -> str:
        """The file: ranks that may issue the same share a class."""
        lines = [
            "# What a step communicates. Written by --update-budgets: review the difference.",
            f'torch = "{self.torch}"',
            f"world_size = {self.world_size}",
            *(["tests = [", *(f"    {_quoted(test)}," for test in self.tests), "]"] if self.tests else []),
        ]
        classes = grouped((tuple(sorted(amounts.items())), rank) for rank, amounts in sorted(self.of_ranks.items()))
        for amounts, ranks in classes.items():
            lines += ["", "[[class]]", f"ranks = {ranks}"]
            for (group, op), budgeted in amounts:
                lines += ["[[class.issued]]", f"group = {_quoted(group)}", f'op = "{op}"']
                lines += [f"calls = {budgeted.calls}", f"bytes = {budgeted.bytes}"]
        return "\n".join([*lines, ""])

    def write(self, path: Path) -> None:
        """Write the file, so that others see it as it was or as it is now. Raises BudgetError."""
        file = _file_of(path)
        try:
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only", str(file))
            write_atomically(file, self.text())
        except OSError as error:
            raise _cannot_write(path, error) from None

    def why_exceeded(self, rank: int, world_size: int, torch: str, facts: RankFacts) -> str:
        """The rows by which a rank has not issued its budget, with lines and modules; "" if it keeps that.

        Raises BudgetError.
        """
        if self.world_size != world_size:
            raise BudgetError(
                f"the budget is one of {count(self.world_size, 'rank')}, and this world has {world_size}: name a file "
                "for each world size"
            )
        if rank not in self.of_ranks:
            raise BudgetError(f"the budget has no class with rank {rank}: write it again with --update-budgets")
        budget, seen = self.of_ranks[rank], amounts_of(facts)
        if budget and not seen:
            raise BudgetError("the block issues nothing, so that it cannot exceed its budget")
        keys = sorted({*budget, *seen})
        groups, ops = (max((len(key[part]) for key in keys), default=0) for part in (0, 1))
        rows = []
        for key in keys:
            allowed, issued = (amounts.get(key, Budgeted(0, 0)) for amounts in (budget, seen))
            if issued != allowed:
                rows.append(f"  {key[0]:<{groups}}  {key[1]:<{ops}}  {_difference(issued, allowed)}")
                rows += _places(facts, *key)
        if len(rows) > _MOST_LINES:
            rows = [*rows[:_MOST_LINES], f"  ... and {count(len(rows) - _MOST_LINES, 'line')} more"]
        if rows and torch != self.torch:
            rows.append(f"The budget was made with torch {self.torch}; this is {torch}.")
        return "\n".join(rows)


def _amounts_of_rows(rows: Any) -> Amounts:
    """Read the tables of what ranks issue. Raises KeyError, TypeError or ValueError."""
    amounts: dict[tuple[str, str], Budgeted] = {}
    for row in rows:
        key = row["group"], row["op"]
        if key in amounts:
            raise ValueError(f"{key[1]} of group {key[0]} is there twice")
        amounts[key] = Budgeted(int(row["calls"]), int(row["bytes"]))
    return amounts


def _quoted(text: str) -> str:
    """A string as TOML has it, which escapes as JSON does, and one character more."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _difference(issued: Budgeted, allowed: Budgeted) -> str:
    parts = []
    if issued.calls != allowed.calls:
        parts.append(f"{count(issued.calls, 'call')}, budget {allowed.calls} ({issued.calls - allowed.calls:+})")
    if issued.bytes != allowed.bytes:
        parts.append(f"{count(issued.bytes, 'byte')}, budget {allowed.bytes} ({issued.bytes - allowed.bytes:+})")
    return "; ".join(parts)


def _places(facts: RankFacts, group: str, op: str) -> list[str]:
    """The lines and modules of such calls, the most frequent first."""
    places = Counter(
        (facts.place_of(call), ", ".join(call.given))
        for known, call in facts.with_groups()
        if call.kind == op and title_of(known) == group
    )
    return [f"    {number:>4} at {place}   {given}".rstrip() for (place, given), number in places.most_common()]


def update(path: Path, since: int, test: str, world_size: int, torch: str, rank: int, facts: RankFacts) -> None:
    """Write what a rank has issued in a test. Ranks and processes take turns.

    `since`: the nanosecond in which the run has begun. What the file has from before is dropped; all blocks that write
    it in one run must issue the same. Raises AssertionError where they do not, and BudgetError.
    """
    with _turn(path):
        before = _written_since(path, since)
        if before is not None and (before.world_size != world_size or rank in before.of_ranks):
            title = _in_conflict(path, before.tests, test)
            try:
                difference = before.why_exceeded(rank, world_size, torch, facts)
            except BudgetError as error:
                raise BudgetError(f"{title}\n  {error}") from None
            if difference:
                raise AssertionError(f"{title}\n{difference}")
        known, tests = ({}, []) if before is None else (before.of_ranks, before.tests)
        Budget(torch, world_size, {**known, rank: amounts_of(facts)}, [*tests, test]).write(path)


def _in_conflict(path: Path, writers: Sequence[str], test: str) -> str:
    """The title of a message: in one run, a budget was written for something else."""
    others = [writer for writer in writers if writer != test]
    if not others:
        return f"{path} has other traffic, of this test before: it must issue the same each time"
    first = others[0] if len(others) == 1 else f"{others[0]} and {count(len(others) - 1, 'other test')}"
    return f"{path} has other traffic, of {first}: name a file for each"


def _file_of(path: Path) -> Path:
    """The file that is written for a budget: a link stays one."""
    # Other than `resolve`, it takes a link to itself in all versions of Python.
    return Path(os.path.realpath(path))


def _cannot_write(path: Path, error: OSError) -> BudgetError:
    return BudgetError(f"the budget {path} cannot be written: {error}")


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Have the file of a budget alone for the length of a `with`, by a lock on its folder. Raises BudgetError."""
    try:
        parent = _file_of(path).parent
        parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_write(path, error) from None
    try:
        try:
            lock(folder)
        except OSError as error:
            raise _cannot_write(path, error) from None
        yield
    finally:
        os.close(folder)


def _written_since(path: Path, since: int) -> Budget | None:
    """The budget in a file if tests have written it after a time."""
    with suppress(OSError, BudgetError):
        if path.stat().st_mtime_ns >= since:
            budget = Budget.read(path)
            return budget if budget.tests else None
    return None
