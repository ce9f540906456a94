"""The mechanisms that can only be seen end to end, each with a test of it that is in `core`, whatever it costs.

Every other test of `core` costs at most 1 second of CPU: see `tiers.py`. A row is the id of one test, below `test/`.
"""

from __future__ import annotations

CORE: dict[str, str] = {}
