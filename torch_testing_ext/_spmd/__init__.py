"""The data-parallel compiler: `trace/` records a train step, `lower/` makes it data parallel, `run/` executes it."""
