"""Capture: records a whole step as one program, which later calls run without Python."""
