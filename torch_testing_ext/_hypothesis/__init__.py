"""Hypothesis across ranks: only rank 0 runs the engine, and the other ranks follow it, one example at a time.

Imports the test bases and all below them; of the rest, only the plugin and the mirror import it.

A single engine cannot disagree with itself. For each example, rank 0 draws the arguments and sends them to all ranks;
every rank runs the test's body and reports its outcome; rank 0 combines the outcomes into one and passes it to
Hypothesis. A rank that leaves an example early would leave others waiting in a collective: their waits are
interrupted, and all ranks replace their process groups before the next example.

    given_in_ranks        `given`, `note` and `target`
    own_given             the same for Hypothesis's own `given` in classes with ranks
    property_run          a whole property test in one rank
    property_roles        the two roles: Leader (rank 0) and Follower
    blueprints            the values that rank 0 sends
    example_outcomes      the end of an example in one rank and in all of them
    links                 messages between the ranks
    groups_of_examples    the process group under test
    example_watchdog      the thread that interrupts waits
    hypothesis_internals  the undocumented parts of Hypothesis that we use
    replayed_examples     examples that every run has
    strategies/           strategies for tensors, meshes, placements and groups

The mirror offers `given_in_ranks`, `blueprints` and the strategies, and imports `own_given`. The plugin takes
`replayed_examples`.
"""
