"""What a user may ask for: the option table, and how options are read from files, environment and command line."""
