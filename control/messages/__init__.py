"""Control messages: one class per kind, which validates itself; one module per conversation.

docs/protocol.md specifies every field. A change of a field here also changes that page and, unless old processes may
ignore it, `PROTOCOL_VERSION`. Unknown fields are ignored, and missing optional ones take their defaults.
"""

from control.messages.common import *
from control.messages.membership import *
from control.messages.outputs import *
from control.messages.prefill import *
from control.messages.requests import *
