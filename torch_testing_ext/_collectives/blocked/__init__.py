"""The threads of a rank, and the reasons for which the rank may go on without its peers.

Only ranks import `process_threads`; the rules read a `RankState`, which needs no torch.

    reachable_threads  threads that can reach torch.distributed
    rank_state         the threads of a rank at a moment; why it may go on
    event_loops        event loops in which a thread waits
    method_calls       the method that a frame calls now
    process_threads    the threads of this process: only in ranks
"""
