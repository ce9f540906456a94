"""Stand-ins for the test harnesses of other projects, one module for each: the rest of the package knows none."""
