"""Questions on devices, asked in a way that leaves this process able to fork ranks."""

from typing import Any

from torch_testing_ext._process import fork_safety
from torch_testing_ext._process.questions import By, NoAnswer, Silence, ask_elsewhere
from torch_testing_ext._torch.devices import accelerator_state, first_accelerator_use

from .device_questions import QUESTIONS

# A driver that initialises many devices takes seconds; a child that needs longer than this is stuck.
FORK_TIMEOUT = 60.0
# A new interpreter imports torch before it asks.
INTERPRETER_TIMEOUT = 120.0
# The answer of a forked child whose parent has initialised the driver.
_TOO_LATE = "the driver was initialised before the fork"
_DRIVER = "the driver of the accelerators"


def answer_to(question: str) -> Any:
    """Ask in the way that leaves this process as it is. Raises NoAnswer."""
    if accelerator_state.accelerator_is_initialised():
        return _ask(question)
    if not fork_safety.other_threads() and not accelerator_state.accelerator_is_in_bad_fork():
        try:
            answer = ask_elsewhere(_ask_unless_too_late, question, by=By.FORK, who=_DRIVER, timeout=FORK_TIMEOUT)
        except NoAnswer as error:
            # A fork may fail where a new process does not.
            if error.silence is Silence.LATE:
                raise
        else:
            # This process has initialised the driver before: asking here does no more harm.
            return _ask(question) if answer == _TOO_LATE else answer
    return ask_elsewhere(_ask, question, by=By.INTERPRETER, who=_DRIVER, timeout=INTERPRETER_TIMEOUT)


def _ask_unless_too_late(question: str) -> Any:
    """In a forked child: ask, unless its parent had initialised the driver, which no child of it can use."""
    return _TOO_LATE if accelerator_state.accelerator_is_in_bad_fork() else _ask(question)


def _ask(question: str) -> Any:
    """Ask in this process, where nothing is to be noted any more."""
    first_accelerator_use.stop_noting()
    ask = QUESTIONS[question]
    return ask()
