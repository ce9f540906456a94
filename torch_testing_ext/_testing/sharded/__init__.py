"""Bases, models and checks for FSDP and DTensor."""
