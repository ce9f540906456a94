"""The machine that tests run on: accelerators, flags, ports, environment variables and seeds."""
