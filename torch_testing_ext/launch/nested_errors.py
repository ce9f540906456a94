"""Exceptions whose message has the tracebacks of others: their causes are what matters.

Distributed checkpoints raise such a one in all ranks, for what has happened in some; so do pools and launchers.
"""

from __future__ import annotations

import re

from torch_testing_ext._process.words import grouped, list_of

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):(?: \(RANK (?P<rank>\d+)\))?\s*$")


def causes_of(error: BaseException, message: str) -> list[str]:
    """The exceptions whose tracebacks are in the message of an exception of torch, a line each, with ranks if named.

    Of a chain of exceptions, the last one counts. Others than torch say what matters before a traceback.
    """
    if not type(error).__module__.startswith("torch."):
        return []
    by_rank: dict[int | None, str] = {}
    rank: int | None = None
    is_in_frames = False
    for line in message.splitlines():
        if begin := _TRACEBACK.match(line):
            rank = int(begin["rank"]) if begin["rank"] else rank
            is_in_frames = True
        elif is_in_frames and line.strip() and not line.startswith((" ", "\t")):
            by_rank[rank] = line.strip()
            is_in_frames = False
    alike = grouped((cause, of_rank) for of_rank, cause in by_rank.items())
    return [_in_words(cause, [each for each in ranks if each is not None]) for cause, ranks in alike.items()]


def _in_words(cause: str, ranks: list[int]) -> str:
    return f"{cause} ({list_of(ranks)})" if ranks else cause
