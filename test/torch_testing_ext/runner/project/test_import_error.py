"""Cannot be imported."""

import there_is_no_such_module  # noqa: F401
