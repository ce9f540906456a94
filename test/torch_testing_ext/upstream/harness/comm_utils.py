"""FlashInfer's way, in miniature: a process for each rank, which gets its numbers and a port as arguments."""

import processes


def multi_process_parallel(world_size, test_target, target_args=()):
    processes.run(world_size, lambda rank, port: test_target(world_size, rank, port, *target_args))
