"""Process groups in torch: which a process has made, what they record, and how they fail.

Others may take each of the modules.

    process_groups     questions about groups, and what leaving them needs
    made_groups        the log of the groups of this process
    watched_groups     the watch that writes it
    flight_recorder    torch's record of collectives
    keys_of_stores     keys that a store lacks
    gloo_messages      our record of gloo's sends, receives and monitored barriers
    roots_of_calls     our record of roots
    collective_errors  errors of collectives
    dataless_groups    groups that do not communicate
    thread_worlds      a world of groups for each thread
"""
