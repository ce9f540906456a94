"""Execution of compiled steps: find the program for a call, bind it to model and optimizers, run it."""
