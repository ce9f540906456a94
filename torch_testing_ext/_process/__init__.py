"""The basics of every process that we start: start-up, signals, messages, an event loop, the wording of its end."""
