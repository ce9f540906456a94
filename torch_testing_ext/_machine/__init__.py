"""The machine that tests run on: accelerators, flags, ports and seeds."""
