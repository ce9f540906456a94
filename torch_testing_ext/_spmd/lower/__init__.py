"""Lowering: turns the graph of the local program into a data-parallel one, and that into a callable."""
