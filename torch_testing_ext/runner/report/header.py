"""The header of the reports: where a run took place, and with which software. Pure."""

from __future__ import annotations

from ..model import RunHeader


def header_facts(header: RunHeader) -> list[tuple[str, str]]:
    """The known facts, each with its name."""
    changed = " (with uncommitted changes)" if header.uncommitted_changes else ""
    facts = [
        ("command", header.command),
        ("commit", f"{header.commit}{changed}" if header.commit else ""),
        ("host", header.host),
        ("torch", header.torch),
        ("Python", header.python),
        ("devices", header.devices),
    ]
    return [(name, value) for name, value in facts if value]
