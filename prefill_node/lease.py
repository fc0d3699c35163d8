"""How long a prefill node may touch a decode node's memory after that was last known to live."""

import time
from collections.abc import Callable

LEASE_S = 2.0
"""Nothing is posted to a decode node after so long without an answered ping: its address may be another process's."""
_LOOK_S = 0.02


def await_lease(
    silence: Callable[[], float], is_wanted: Callable[[], bool], is_ready: Callable[[], bool] = lambda: True
) -> bool:
    """Wait while the decode node may be dead. Whether what waits is still wanted, and may be posted now.

    silence: for how many seconds the decode node may have been dead (`ControlPlane.silence`). is_ready: what else has
    to be true.
    """
    while is_wanted():
        if silence() < LEASE_S and is_ready():
            return True
        time.sleep(_LOOK_S)
    return False
