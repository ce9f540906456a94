"""The basics of every process that we start: signals, messages, the event loop, files, the user's shell, its end.

It knows nothing of tests, ranks or accelerators, and imports nothing of this package.
"""
