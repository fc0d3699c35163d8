"""Control messages: one class per kind, which validates itself; one module per conversation.

docs/protocol.md has the protocol: who repeats what until what answers it, the states, and what of a frame is the same
in every wire version. Whoever changes a field here changes that page and, unless old processes may ignore the change,
`PROTOCOL_VERSION`. Unknown fields are ignored, and missing optional ones take their defaults.
"""

from collections.abc import Mapping

from control.messages.common import (
    ADDRESS_PATTERN,
    MAX_RANKS,
    Address,
    CacheSalt,
    CheckpointIdentity,
    Identity,
    Message,
    ModelIdentity,
    Peer,
    Ranks,
    Role,
    TokenId,
    TokenIds,
)
from control.messages.destination import Destination
from control.messages.fetch import FetchDone, FetchGrant, FetchRefused, FetchRequest
from control.messages.liveness import Ping, Pong
from control.messages.membership import (
    MAX_CACHE_BLOCKS,
    CacheUpdate,
    HashColumn,
    Heartbeat,
    HeartbeatAck,
    Leaving,
    Refused,
    Register,
    Registered,
)
from control.messages.outputs import FinishReason, Output, Outputs, RowDetails, RowLogprob, Token
from control.messages.prefill import (
    Abort,
    Admitted,
    AttemptId,
    ChunkDone,
    ChunkTaken,
    Holding,
    NotHeld,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
)
from control.messages.requests import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASES,
    MAX_CHOICES,
    Accepted,
    Bias,
    Cancel,
    Ended,
    FurtherChoice,
    Generate,
    Penalty,
    Rejected,
    RepetitionPenalty,
    Resend,
    Sampling,
)

__all__ = [
    "ADDRESS_PATTERN",
    "MAX_ALLOWED",
    "MAX_BAD_WORD_TOKENS",
    "MAX_BIASES",
    "MAX_CACHE_BLOCKS",
    "MAX_CHOICES",
    "MAX_RANKS",
    "SENT_BY",
    "Abort",
    "Accepted",
    "Address",
    "Admitted",
    "AttemptId",
    "Bias",
    "CacheSalt",
    "CacheUpdate",
    "Cancel",
    "CheckpointIdentity",
    "ChunkDone",
    "ChunkTaken",
    "Destination",
    "Ended",
    "FetchDone",
    "FetchGrant",
    "FetchRefused",
    "FetchRequest",
    "FinishReason",
    "FurtherChoice",
    "Generate",
    "HashColumn",
    "Heartbeat",
    "HeartbeatAck",
    "Holding",
    "Identity",
    "Leaving",
    "Message",
    "ModelIdentity",
    "NotHeld",
    "Output",
    "Outputs",
    "Peer",
    "Penalty",
    "Ping",
    "Pong",
    "PrefillAccepted",
    "PrefillDone",
    "PrefillFailed",
    "PrefillRequest",
    "Progress",
    "Quiesced",
    "Ranks",
    "Refused",
    "Register",
    "Registered",
    "Rejected",
    "RepetitionPenalty",
    "Resend",
    "Role",
    "RowDetails",
    "RowLogprob",
    "Sampling",
    "Token",
    "TokenId",
    "TokenIds",
]

_ANY: frozenset[type[Message]] = frozenset({Ping, Pong})
_NODE: frozenset[type[Message]] = _ANY | {Register, Heartbeat, Leaving, CacheUpdate}
SENT_BY: Mapping[Role, frozenset[type[Message]]] = {
    "gateway": _ANY | {Registered, Refused, HeartbeatAck, Generate, Ended, Resend, Cancel},
    "prefill": _NODE
    | {PrefillAccepted, ChunkDone, PrefillDone, PrefillFailed, Quiesced, NotHeld, Progress, FetchRequest, FetchDone},
    "decode": _NODE
    | {Accepted, Rejected, Outputs, PrefillRequest, ChunkTaken, Admitted, Abort, Holding, FetchGrant, FetchRefused},
}
"""What each role may send. Anything else from it is malformed."""
