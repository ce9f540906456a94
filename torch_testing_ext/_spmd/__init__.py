"""The data-parallel compiler: `compile` makes a train step for one device run on all ranks of a group.

Could be a product of its own: it imports `_torch`, `_process` and `_machine`, and of the rest only the mirror's
`distributed._spmd` imports it. `compiling` has `compile`; the engine (`state_engine`, `averaging`) runs the step's
Python, the capture (`step_recording`, `lowering`) makes a program of it.
"""
