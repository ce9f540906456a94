"""The rules for whole worlds of ranks, which ran one after the other.

Pure. Reports take `world_views`; the rest is for those who run worlds.

    world_records      what the ranks have done
    group_differences  groups that ranks made differently
    world_progress     how far the ranks would come
    unknown_values     values that were never communicated, and what follows for a finding
    world_traffic      bytes from rank to rank
    world_views        a world as data for pictures
"""
