"""The headers of the ranks' logs: numbers by which they are compared before anybody reads a log."""

from __future__ import annotations

import struct

# The places of a header's numbers, each of 8 bytes.
VERSION, COUNT, LOST, TEXTS_END, TEXTS, NOTES, P2P, IRREGULAR, GROUPS, EVENTS, MEMORY = range(11)
FIRST_SLOT, HEADER = 16, 128
SLOTS = HEADER - FIRST_SLOT


def numbers_of(headers: list[bytes]) -> list[tuple[int, ...]]:
    """The numbers of the headers that are there."""
    return [struct.unpack(f"={HEADER}Q", header) for header in headers if header]


def is_quiet(headers: list[bytes]) -> bool:
    """Whether the headers show that there is nothing to be read: all members of every group have issued the same.

    The groups of ranks have the same numbers where the ranks have made the same groups, as a hash of the names says;
    where they have not, or where something else was noted, the logs must be read.
    """
    known = numbers_of(headers)
    if not known:
        return True
    for header in known:
        if header[LOST] or header[NOTES] or header[P2P] or header[IRREGULAR]:
            return False
    if len(known) < len(headers) or len({header[GROUPS] for header in known}) > 1:
        return False
    return len({header[FIRST_SLOT:] for header in known}) == 1


def have_notes(headers: list[bytes]) -> bool:
    """Whether a rank has found something by itself."""
    return any(header[NOTES] for header in numbers_of(headers))


def show_mismatch(headers: list[bytes]) -> bool:
    """Whether ranks have issued as many collectives in a group as others, and not the same. The logs tell for sure."""
    known = numbers_of(headers)
    if len({header[GROUPS] for header in known}) > 1:
        return False
    for slot in range(FIRST_SLOT, HEADER):
        used = {header[slot] for header in known if header[slot]}
        counts = {number >> 32 for number in used}
        if len(counts) < len(used):
            return True
    return False


def uses_groups(headers: list[bytes]) -> int:
    """In how many groups ranks have issued collectives: as many as there are numbers of groups in use."""
    known = numbers_of(headers)
    if any(header[IRREGULAR] or header[P2P] for header in known):
        return SLOTS
    return sum(any(header[slot] for header in known) for slot in range(FIRST_SLOT, HEADER))
