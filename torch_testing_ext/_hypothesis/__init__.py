"""Hypothesis across ranks: only rank 0 runs the engine, and the other ranks follow it, one example at a time.

Imports the test bases and all below them; of the rest, only the plugin and the mirror import it.

A single engine cannot disagree with itself. For each example, rank 0 draws the arguments and sends them to all ranks;
every rank runs the test's body and reports its outcome; rank 0 combines the outcomes into one and passes it to
Hypothesis. A rank that leaves an example early would leave others waiting in a collective: their waits are
interrupted, and all ranks replace their process groups before the next example.

    property_run.py          `given`, `note` and `target`; the two roles, Leader (rank 0) and Follower; a whole run
    examples.py              the values that rank 0 sends, and how an example ended in one rank and in all of them
    links.py                 messages between the ranks, the group under test, the watchdog that interrupts waits
    hypothesis_internals.py  the undocumented parts of Hypothesis that we use; examples that every run has
    strategies.py            strategies for tensors, meshes, placements and groups
"""
