"""The creation of process groups, and those who take part in it."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch_testing_ext._torch import replacing

# Makes the group by a call of its second argument. It may change the arguments, which the first has by name.
Creator = Callable[[dict[str, Any], Callable[[], Any]], Any]
# Those who take part, the innermost first.
_creators: list[Creator] = []


def take_part(creator: Creator) -> None:
    """From now on, let each process group be made by this function, around those that took part before.

    `_new_process_group_helper`: 2.11 to 2.15.
    """
    if not _creators:
        replacing.replace_for_good("creation of groups", _through_creators)
    _creators.append(creator)


def _through_creators(_: str, create: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create)

    # Whoever wraps it once more reads its parameters.
    @functools.wraps(create)
    def create_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)

        def create_by(creators: Sequence[Creator]) -> Any:
            if not creators:
                return create(*given.args, **given.kwargs)
            return creators[-1](given.arguments, lambda: create_by(creators[:-1]))

        return create_by(_creators)

    return create_group


def group_of_member(made: Any) -> Any:
    """The group that was made; None where this process is no member of it."""
    import torch.distributed as dist

    return None if made[0] is dist.GroupMember.NON_GROUP_MEMBER else made[0]
