"""For tools that look for a setup.py; metadata and settings are in pyproject.toml."""

from setuptools import setup

setup()
