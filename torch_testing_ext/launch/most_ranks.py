"""The number of ranks that one machine, or a whole world, can have."""

# More would have some 200 GB of torch, and half a million connections of one group.
MOST_RANKS = 1024


def too_many(world_size: int) -> str:
    """Why there cannot be so many ranks; "" if there can."""
    if world_size <= MOST_RANKS:
        return ""
    return (
        f"at most {MOST_RANKS} are possible: each rank is a process on this machine that imports torch and "
        f"connects to all others"
    )


# A log has room for a few groups of so many members, and each rank takes some milliseconds.
MOST_RANKS_OF_WORLD = 16_384


def too_many_in_world(size: int) -> str:
    """Why a whole world cannot have so many ranks; "" if it can."""
    return "" if size <= MOST_RANKS_OF_WORLD else f"a whole world has at most {MOST_RANKS_OF_WORLD:,} ranks"
