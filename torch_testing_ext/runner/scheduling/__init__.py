"""Chooses what runs, when and on which devices."""
