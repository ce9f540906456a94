"""What the threads of a rank do, and whether the rank can go on without its peers.

reachable_threads  threads that can reach torch.distributed
rank_state         the threads of a rank at a moment; why it may go on
method_calls       the method that a frame calls now
process_threads    the threads of this process: only in ranks
"""
