"""Control messages: one class per kind, which validates itself; one module per conversation.

docs/protocol.md has the protocol: who repeats what until what answers it, the states, and what of a frame is the same
in every wire version. Whoever changes a field here changes that page and, unless old processes may ignore the change,
`PROTOCOL_VERSION`. Unknown fields are ignored, and missing optional ones take their defaults.
"""

from control.messages.common import *
from control.messages.membership import *
from control.messages.outputs import *
from control.messages.prefill import *
from control.messages.requests import *
