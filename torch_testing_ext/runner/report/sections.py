"""The table of sections, which reports ask for results besides outcomes and messages."""

from __future__ import annotations

from typing import Any

from .section import Section
from .sweep_section import SweepSection
from .world_section import WorldSection

SECTIONS: tuple[Section[Any], ...] = (WorldSection(), SweepSection())


def section_of(result: object) -> Section[Any]:
    """The section for one of the results of a test."""
    return next(section for section in SECTIONS if isinstance(result, section.kind))
