"""The basics of every process that we start; each module is named after its subject.

It imports nothing of this package and no test framework, and knows neither tests nor ranks. Only `fork_safety` knows
whose threads do no harm, among them those of pytest's plugins.
"""
