"""Bases and models for tests of DTensor."""
