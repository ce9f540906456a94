"""Decorators for a test function or class: its needs, skips, timeout and parameters.

They only describe a test; the bases and the runner act on that. Imports the helpers, not the bases.
"""
