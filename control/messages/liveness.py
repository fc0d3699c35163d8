"""Between any two processes: which of them live."""

from base.wire import UInt
from control.messages.common import Message


class Ping(Message):
    """Is this process alive? Its control thread answers, however busy the process is. Stable."""

    nonce: UInt


class Pong(Message):
    """The process lived after the ping with this nonce was sent; the sender says which boot it is. Stable."""

    nonce: UInt
