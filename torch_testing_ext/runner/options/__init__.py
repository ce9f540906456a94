"""The options of a run: the option table, and reading options from files, the environment and the command line."""
