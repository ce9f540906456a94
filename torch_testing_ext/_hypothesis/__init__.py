"""Hypothesis across ranks: only rank 0 runs the engine, and the other ranks follow it, one example at a time.

A single engine cannot disagree with itself. For each example, rank 0 draws the arguments and sends them to all ranks;
every rank runs the test's body and reports its outcome; rank 0 combines the outcomes into one and passes it to
Hypothesis. A rank that leaves an example early would leave others waiting in a collective: their waits are
interrupted, and all ranks replace their process groups before the next example.

    given.py                 `given`, `note` and `target`, as the tests use them
    property_run.py          a whole property test in a rank, from connecting to the report
    replay.py                examples that are data, which every run has
    participants.py          the two roles: Leader (rank 0) and Follower
    outcome.py               how an example ended in one rank, and in all of them. Pure.
    example_values.py        the values that rank 0 sends, and how each rank turns them into arguments
    links.py                 messages between the ranks, without a process group
    watchdog.py              when to cut: it interrupts collectives that will never end
    groups.py                the process group under test, its replacement, and the connections that are cut then
    hypothesis_internals.py  the undocumented parts of Hypothesis that we use
    strategies/              strategies for tensors, meshes, placements, groups, programs of collectives
"""
