"""Signs by which torch is known from outside: names of its threads, and texts of its errors.

No module here imports torch: the rules read signs in processes that have not imported it.

    error_texts     texts of errors that say why
    native_threads  threads of C++ that serve, and how they wait
"""
