"""Running the units of a plan on this machine."""
