"""The variables that differ from one terminal to the next, and say nothing to a test."""

_OF_TERMINALS = {
    *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TERM", "COLORTERM", "TERM_SESSION_ID", "WINDOWID", "TTY"),
    *("TMUX", "TMUX_PANE", "STY", "DISPLAY", "WAYLAND_DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM", "NO_COLOR"),
}
_PREFIXES_OF_TERMINALS = ("SSH_", "XDG_", "DBUS_", "VSCODE_", "LESS")


def is_of_terminal(variable: str) -> bool:
    """Whether a variable says only in which terminal, window or session the user sits."""
    return variable in _OF_TERMINALS or variable.startswith(_PREFIXES_OF_TERMINALS)
