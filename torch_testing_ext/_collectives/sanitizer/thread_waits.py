"""Work of ranks that are threads: whether they wait for it, and what they do to its buffers before that.

Here all work is complete at once. With other ranks, what is found would be a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_testing_ext._torch.operations import watched_waits

from .operation_checks import name_of_operation
from .watched_works import WaitCheck

# The file, line and function of a call.
_Site = tuple[str, int, str] | None


class ThreadWaits:
    """Follows the work of one rank. `note` gets the kind of a finding, a sentence, its line and the work's."""

    def __init__(self, note: Callable[[str, str, _Site, _Site], None], site: Callable[[], _Site]):
        self._site = site
        self._sites: list[_Site] = [None]

        def note_sites(kind: str, text: str, place: int, place_of_work: int) -> None:
            note(kind, text, self._sites[place], self._sites[place_of_work])

        self.check = WaitCheck(note_sites, lambda: self._number_of(site()))

    def _number_of(self, site: _Site) -> int:
        self._sites.append(site)
        return len(self._sites) - 1

    @contextmanager
    def around(self, watches_uses: bool) -> Iterator[None]:
        """The rank runs its test in this thread. `watches_uses`: look at each operation on tensors, too."""
        if watches_uses:
            self.check.watch_uses()
        try:
            yield
        finally:
            self.check.finish()

    def issued(
        self, work: Any, kind: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], issuer: Any
    ) -> None:
        """A collective is complete, and its caller gets this work. In one that works in place, outputs are all."""
        tensors = list(inputs or outputs)
        name = name_of_operation(kind, tensors)
        number = self._number_of(self._site())
        self.check.after_in_thread(work, name, outputs, inputs, number, issuer)


def watch_waits(ranks: Sequence[ThreadWaits]) -> None:
    """Tell all ranks of each wait of this process: it is not known whose work that is. Without ranks, of none."""

    def tell(work: Any) -> None:
        for rank in ranks:
            rank.check.waited(work)

    watched_waits.hooks.leave()
    if ranks:
        watched_waits.hooks.tell(watched_waits.WaitListener(tell))
