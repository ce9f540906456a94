"""The data-parallel compiler: `engine/` runs a train step, `capture/` records it, `lower/` makes that data parallel."""
