"""Tests for pytest that run in ranks: the mark `world_size`, the fixture `dist_env`, and what reports say of them."""
