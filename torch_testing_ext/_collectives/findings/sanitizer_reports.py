"""Findings of the sanitizer about one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_testing_ext._process.code_sites import Site

from .finding import Doing, Finding, FindingKind


def finding_of_rank(rank: int, note: Mapping[str, Any]) -> Finding:
    """The finding that a rank has written into its log."""
    site = Site(*note["site"]) if note.get("site") else None
    issued = Site(*note["issued"]) if note.get("issued") else None
    sentence = f"rank {rank}: {note['text']}"
    if site:
        sentence += f" ({site})"
    if issued:
        sentence += f", issued at {issued}"
    return Finding(FindingKind(note["kind"]), sentence, (Doing(rank, note["text"], site),), (rank,))
