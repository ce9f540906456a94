"""Signs by which torch is known from outside: names of its threads, texts of its errors, keys of its records.

No module here imports torch: the rules read signs in processes that have not imported it.

    error_texts       texts of errors that say why
    native_threads    threads of C++ that serve, and how they wait
    recorded_entries  entries of the flight recorders
"""
