"""DistributedDataParallel."""

from typing import Any


def logged_by_ddp(model: Any) -> dict[str, Any]:
    """Return what DDP has logged of its latest iterations. `_get_ddp_logging_data`: 2.11 to 2.15."""
    logged: dict[str, Any] = model._get_ddp_logging_data()
    return logged
