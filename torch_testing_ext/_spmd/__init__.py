"""The data-parallel compiler: `trace/` records a step, `lower/` makes it data parallel, `run/` calls it."""
