"""A file with every form of import of PyTorch's kit, and files that differ from it in their bytes."""

from .files import subject

EVERY_FORM = subject(__file__, "every_form_of_import.txt")
LATIN = EVERY_FORM.replace("utf-8 -*-", "latin-1 -*-").encode("latin-1")
FILES = {
    "lf": EVERY_FORM.encode(),
    "crlf": EVERY_FORM.replace("\n", "\r\n").encode(),
    "mixed": EVERY_FORM.encode().replace(b":\n", b":\r\n"),
    "bom": b"\xef\xbb\xbf" + EVERY_FORM.encode(),
    "latin_1": LATIN,
    "no_newline_at_end": EVERY_FORM.encode().rstrip(),
    "empty": b"",
    "nothing_of_it": b"import torch\n",
}
