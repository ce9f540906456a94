"""The operations of c10d: hooks on them, on their works and stores, and the tensors that they use.

Only a process that logs its calls or runs a whole world imports these.

    operation_hook  hears of each operation before it is issued
    backend_calls   hears of calls of a backend's own methods
    works           the works that operations return
    watched_waits   hears of waits for works and futures
    watched_stores  hears of calls of stores
    tensor_uses     hears of reads and writes of tensors
"""
