"""The engine: the user's Python runs the step, and the state that it works on is data parallel."""
