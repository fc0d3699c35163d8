"""How a rank drains and ends: with the others of its group."""

import structlog

from ranks.group import Ranks
from ranks.group_table import Standing
from service.lifecycle import Lifecycle, Phase

log = structlog.get_logger(__name__)

_STANDING = {
    Phase.SERVING: Standing.SERVING,
    Phase.DRAINING: Standing.DRAINING,
    Phase.ENDING: Standing.ENDING,
}


def stand_with_group(lifecycle: Lifecycle, ranks: Ranks) -> None:
    """If one rank drains or ends, all do. To be called in every turn of a rank's loop."""
    own = _STANDING[lifecycle.phase]
    standing = ranks.stand(own)
    if standing > own:
        log.info("stopping with the other ranks", phase=standing.name.lower())
    if standing is Standing.ENDING:
        lifecycle.end()
    elif standing is Standing.DRAINING:
        lifecycle.drain()
