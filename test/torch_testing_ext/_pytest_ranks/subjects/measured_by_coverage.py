def in_rank(rank):
    if rank == 0:
        return "first"
    if rank == 1:
        return "second"
    return "never"


def in_unittest_rank():
    return 1


def in_spawned_rank():
    return 2


def in_fixture():
    return 3


def in_standalone_test():
    return 4


def in_async_test():
    return 5


def in_failing_rank():
    return 6


def nowhere():
    return 7
