"""The proof that running ranks cannot go on.

Pure. Others take `proof_of_hang`.

    proof_of_hang  the theorem, its assumptions and its rules
    store_waits    waits at stores as calls
"""
