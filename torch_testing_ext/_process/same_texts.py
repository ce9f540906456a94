"""Texts that are the same but for accidents, such as addresses."""

import re
from collections import Counter

_ACCIDENTS = (
    # <object object at 0x7f...>
    (r"\bat 0x[0-9a-f]+\b", "at an address"),
    (r"\b[Tt]hread 0x[0-9a-f]+\b", "thread"),
    (r"\bpid[ =:]+\d+", "pid"),
)
_SECONDS = r"\b(after|into|in) ?\d+\.\d+ s\b|\b\d+\.\d+ s into\b"
_WARNING = r"\S+:\d+: \w*Warning: |\[(rank\d+\]:)?\[?W[\]\d]"


def without_accidents(text: str) -> str:
    """A text without what differs from one time to the next: addresses, process ids, and how long it took."""
    return re.sub(_SECONDS, "some time", _without_places(text))


def _without_places(text: str) -> str:
    for pattern, word in _ACCIDENTS:
        text = re.sub(pattern, word, text)
    return text


def without_own_number(text: str, rank: int) -> str:
    """A rank's text without its own number in brackets, as torch prints it, and without addresses and process ids.

    Any other number may be a value that was compared, or say more than the number of the rank, so it stays.
    """
    return re.sub(rf"\[rank[ :]?{rank}\]", "[own rank]", _without_places(text), flags=re.IGNORECASE)


def warnings_once(output: str, times: int = 1) -> str:
    """An output in which each warning is told once, with its line of the source; or so many times."""
    kept: list[str] = []
    seen: Counter[str] = Counter()
    is_repeated = False
    for line in output.splitlines():
        if re.match(_WARNING, line):
            is_repeated = seen[line] >= times
            seen[line] += 1
        elif not line.startswith("  "):
            is_repeated = False
        if not is_repeated:
            kept.append(line)
    return "\n".join(kept)
