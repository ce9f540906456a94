"""Tracing: turns a train step into one graph of the local program."""
