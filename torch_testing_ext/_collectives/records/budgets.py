"""Budgets: files that say how often ranks may call each operation in each group, and with how many bytes."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


def file_of(path: Path) -> Path:
    """The file that is written for a budget: a link stays one."""
    # Other than `resolve`, it takes a link to itself in all versions of Python.
    return Path(os.path.realpath(path))


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

    def __init__(self, torch: str, world_size: int, of_ranks: Mapping[int, Amounts]):
        self.torch = torch
        self.world_size = world_size
        self.of_ranks = dict(of_ranks)

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
            return cls(str(content["torch"]), int(content["world_size"]), of_ranks)
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
        file = file_of(path)
        written = file.with_name(f".budget.{os.getpid()}")
        try:
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only", str(file))
            try:
                written.write_text(self.text(), "utf-8")
                written.replace(file)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            raise BudgetError(f"the budget {path} cannot be written: {error}") from None

    def why_exceeded(self, rank: int, world_size: int, torch: str, facts: RankFacts) -> str:
        """The difference between what a rank has issued and its budget, by line and module; "" if it keeps that.

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
        rows = []
        for group, op in sorted({*budget, *seen}):
            allowed = budget.get((group, op), Budgeted(0, 0))
            issued = seen.get((group, op), Budgeted(0, 0))
            if issued != allowed:
                rows.append(f"  {group:<12} {op:<24} {_difference(issued, allowed)}")
                rows += _places(facts, group, op)
        if not rows:
            return ""
        if len(rows) > _MOST_LINES:
            rows = [*rows[:_MOST_LINES], f"  ... and {count(len(rows) - _MOST_LINES, 'line')} more"]
        other = "" if torch == self.torch else f" (which was made with torch {self.torch}; this is {torch})"
        return "\n".join([f"rank {rank} does not keep its budget{other}:", *rows])


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


def updated(before: Budget | None, torch: str, world_size: int, of_ranks: Mapping[int, Amounts]) -> Budget:
    """The budget with what ranks have issued; those of another world are dropped."""
    is_same = before is not None and (before.torch, before.world_size) == (torch, world_size)
    known: Sequence[Any] = [before.of_ranks] if before is not None and is_same else []
    merged: dict[int, Amounts] = {}
    for amounts in (*known, of_ranks):
        merged.update(amounts)
    return Budget(torch, world_size, merged)
