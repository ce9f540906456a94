"""The walls in torch between ranks on different pretended nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_testing_ext._torch.replacing import replace_for_good
from torch_testing_ext.launch.pretended_nodes import Place, address_of, is_this_node


def keep_stores_apart(place: Place) -> None:
    """Let a rank that is not on the first node find no store of that at its own address."""

    def watched(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def call(store: Any, *args: Any, **kwargs: Any) -> Any:
            host = kwargs.get("host_name", args[0] if args else None)
            is_master = kwargs.get("is_master", args[3] if len(args) > 3 else False)
            if is_master or not isinstance(host, str) or not is_this_node(host):
                return make(store, *args, **kwargs)
            # An object that C++ has not made cannot be shown in a traceback.
            del store
            raise ConnectionRefusedError(
                f"{place.host_name}: nobody listens at {host}, which is this node itself. A store of the first node "
                f"is at MASTER_ADDR, {address_of(0)} here"
            )

        return call

    replace_for_good("stores of other nodes", watched)
