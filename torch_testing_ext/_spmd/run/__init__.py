"""A compiled step: finding the program of a call, binding it to model and optimizers, calling it."""
