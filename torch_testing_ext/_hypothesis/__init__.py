"""Hypothesis across ranks: rank 0 alone runs the engine, the other ranks do as it says, one example at a time.

There is one engine, so there is nothing that several of them could disagree about. For each example rank 0 draws the
arguments and sends them round; every rank runs the test's body; every rank tells how it went; rank 0 settles one
outcome and tells Hypothesis that. A rank that leaves an example early would leave others waiting in a collective:
they are woken, and all make their process groups anew before the next example.

    outcome.py   how an example ended in a rank, and in all of them. Pure.
    channel.py   messages between the ranks, on no process group
    wires.py     the network connections of a rank, and how to cut them
    wake.py      getting a rank out of a collective that will never end: when to cut
    group.py     the process group under test, and its replacement
    ranks.py     the two parts: Leader, Follower
    run.py       a whole test, from meeting to the report
"""
