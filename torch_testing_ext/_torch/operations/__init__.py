"""The operations of c10d: hooks on them, on their works and stores, and the tensors that they use.

operation_hook  hears of each operation before it is issued
works           the works that operations return
watched_waits   hears of waits for works and futures
watched_stores  hears of calls of stores
tensor_uses     hears of reads and writes of tensors
"""
