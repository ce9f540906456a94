"""The basics of every process that we start; each module is named after its subject.

It imports nothing of this package and no test framework, and knows neither tests nor ranks.
"""
