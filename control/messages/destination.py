"""Where a decode node wants KV written."""

from control.messages.common import ModelIdentity
from transfer.memory import RemotePool


class Destination(RemotePool):
    """A decode node's pool. identity: what its KV has to be."""

    identity: ModelIdentity
