"""The data-parallel compiler: `compile` makes a train step for one device run on all ranks of a group.

Could be a product of its own: it imports `_torch` and `_process`, and of the rest only the mirror's
`distributed._spmd` imports it. `compiling` has `compile`; `engine` is what happens before and after the user's Python
in each call of a step.
"""
