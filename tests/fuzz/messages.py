"""Messages of which one thing is extreme, made from the types of the wire. A seed and an index make one."""

import random
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import msgpack

from control.codec import PROTOCOL_VERSION
from control.messages import Generate, Message, Role
from control.messages.requests import MAX_ALLOWED, MAX_BAD_WORD_TOKENS, MAX_BIASES, MAX_CHOICES
from tests.fuzz.values import Json, log_uniform, text
from tests.fuzz.wire import Known, honest

_RAW = "@@raw@@"
"""Stands in a frame for bytes that msgpack does not make."""
_LONG = 1 << 20
_SIZES = [0, 1, 16, 127, 128, 129, 1024, 1025, 4096, 4097, 16_385, 65_536]
_NUMBERS: list[Any] = [
    *(0, 1, -1, 0.0, -0.0, 0.0099, 0.01, 100.1, 2.0001, 1e-7, 1e-38, 1e-45, 5e-324, 1e38, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), True),
    *(2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
]
_SAMPLING = ["repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "top_p", "min_p", "seed"]


@dataclass(frozen=True)
class Sent:
    """Messages of ZeroMQ, each in its parts, which a process of a role sends one after another."""

    role: Role
    kind: str
    extreme: str
    parts: tuple[tuple[bytes, ...], ...]
    request_ids: tuple[str, ...]
    """Of requests that they may begin."""
    too_large: bool
    """Whether it has more settings than a node may take."""

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for parts in self.parts for part in parts)


@dataclass
class _Draft:
    """kind, sender and so on are in the frame."""

    frame: Json
    copies: int = 1
    raw: bytes = b"\xc0"
    parts: Callable[[bytes], tuple[bytes, ...]] = lambda data: (data,)

    @property
    def body(self) -> Json:
        body: Json = self.frame["body"]
        return body


def message(seed: int, index: int, to: Role, senders: Mapping[Role, Json], known: Known) -> Sent:
    """What a process sends to a node of that role. senders: those that a node may hear, each as a Peer."""
    rng = random.Random(f"{to}:{seed}:{index}")
    make: Callable[[random.Random, _Draft], object] = rng.choices([*_EXTREMES], [*_EXTREMES.values()])[0]
    kinds = [kind for kind in Message.kinds.values() if kind.sent_by & senders.keys()]
    if make in (_penalty, _settings) and "gateway" in senders:
        kinds = [Generate]
    kind = rng.choices(kinds, [_WEIGHTS.get(kind.__name__, 1) for kind in kinds])[0]
    role = rng.choice(sorted(kind.sent_by & senders.keys()))
    body = deepcopy(honest(kind, rng, known))
    sender = {**senders[role]}
    draft = _Draft({"v": PROTOCOL_VERSION, "kind": kind.__name__, "sender": sender, "to": "", "body": body})
    make(rng, draft)
    packed = _packed(draft)
    further = body.get("further")
    requests = [body, *(further if isinstance(further, list) else [])] if kind is Generate else []
    ids = [str(each.get("request_id")) for each in requests[: 2 * MAX_CHOICES] if isinstance(each, dict)]
    return Sent(
        role,
        kind.__name__,
        make.__name__.strip("_"),
        tuple(draft.parts(data) for data in packed),
        tuple(one for one in ids if one.isascii() and 0 < len(one) <= 128),
        make is _settings and _is_too_large(body),
    )


_WEIGHTS = {
    "Generate": 12,
    "HeartbeatAck": 3,
    "ChunkDone": 3,
    "PrefillDone": 4,
    "FetchRequest": 3,
    "PrefillRequest": 12,
}


def _packed(draft: _Draft) -> list[bytes]:
    packed: bytes = msgpack.packb(draft.frame, unicode_errors="surrogatepass")
    return [packed.replace(msgpack.packb(_RAW), draft.raw)] * draft.copies


def _nothing(rng: random.Random, draft: _Draft) -> None:
    """All of it is as a process may well say."""


def _number(rng: random.Random, draft: _Draft) -> None:
    places = [at for at in _places(draft.frame) if type(at[0][at[1]]) in (int, float)]
    container, key = rng.choice(places)
    container[key] = rng.choice(_NUMBERS)


def _penalty(rng: random.Random, draft: _Draft) -> None:
    """Where tokens are sampled."""
    value = rng.choice(_NUMBERS)
    draft.body["sampling"] = {"temperature": 1.0, rng.choice(_SAMPLING): value}
    if rng.random() < 0.3:
        draft.body["sampling"] = {"logit_bias": [[rng.randrange(256), value]]}


def _count(rng: random.Random, draft: _Draft) -> None:
    """Something is long: a list, a map, a text."""
    places = [at for at in _places(draft.frame) if isinstance(at[0][at[1]], list | dict | str)]
    container, key = rng.choice(places)
    value = container[key]
    count = rng.choice(_SIZES) if rng.random() < 0.5 else log_uniform(rng, _LONG)
    if isinstance(value, str):
        container[key] = rng.choice([text(rng, count), "x" * count])
    elif isinstance(value, dict):
        value |= {f"k{number}": 0 for number in range(min(count, 1 << 17))}
    else:
        pattern = value or [rng.choice([0, "a", None, [], [0, 0], {}])]
        container[key] = pattern[:1] * count if rng.random() < 0.5 else [*range(count)]


def _settings(rng: random.Random, draft: _Draft) -> None:
    """Settings as large as they may be, or larger, and as many requests as there may be."""
    over = rng.choice([0, 0, 1])
    few = rng.choice([1, 16])
    large: list[Json] = [
        {"allowed_token_ids": [number % 256 for number in range(MAX_ALLOWED + over)]},
        {"bad_words": [[number % 256] * few for number in range((MAX_BAD_WORD_TOKENS + over) // few)]},
        {"bad_words": [[5]] * log_uniform(rng, 100_000)},
        {"logit_bias": [[number % 256, -100.0] for number in range(MAX_BIASES + over)]},
    ]
    number = draft.body["request_id"]
    further = [{"request_id": f"{number}.{n}", "seed": n} for n in range(rng.choice([0, MAX_CHOICES - 1 + over]))]
    draft.body.update(sampling=rng.choice(large), further=further)


def _is_too_large(body: Json) -> bool:
    """By docs/operations/secure.md."""
    sampling = body["sampling"]
    tokens_of_words = sum(map(len, sampling.get("bad_words", ())))
    others = len(sampling.get("allowed_token_ids", ())) > 2**18 or len(sampling.get("logit_bias", ())) > 1024
    return others or tokens_of_words > 4096 or len(body["further"]) > 127


def _anything(rng: random.Random, draft: _Draft) -> None:
    """Any value, wherever it stands."""
    container, key = rng.choice([*_places(draft.frame)])
    value, count = container[key], log_uniform(rng, 60_000)
    opening, closing = rng.choice([(b"\x91", b"\xc0"), (b"\x81\xa1a", b"\xc0"), (b"\x81\x00", b""), (b"\xc1", b"")])
    draft.raw = rng.choice([opening * count + closing, b"\xdf\xff\xff\xff\xff", b"\xc7\x00\x05", b"\x80" * count])
    container[key] = rng.choice(
        [_RAW, _RAW, [value] * min(count, 3000), {"a": value}, text(rng, 12), b"\xff" * count, None, [], {}, "", "5"]
    )


def _fields(rng: random.Random, draft: _Draft) -> None:
    """One that is missing, or unknown."""
    if rng.random() < 0.5:
        maps = [draft.frame, draft.body, *(c[k] for c, k in _places(draft.body) if isinstance(c[k], dict))]
        container = rng.choice([each for each in maps if each]) if draft.body else draft.frame
        del container[rng.choice([*container])]
    else:
        draft.body[text(rng, log_uniform(rng, 300))] = rng.choice([0, "a", [0] * log_uniform(rng, _LONG)])


def _header(rng: random.Random, draft: _Draft) -> None:
    """Another version, kind, sender or addressee."""
    sender = draft.frame["sender"]
    draft.frame |= rng.choice(
        [
            {"v": rng.choice([0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 2**63 - 1, 2**64 - 1, -1])},
            {"kind": rng.choice(["", "Generate ", "x" * 10_000, *Message.kinds])},
            {"to": rng.choice(["nobody", "x" * 128, "x" * 129])},
            {"sender": {**sender, "role": rng.choice(["gateway", "prefill", "decode", "x"])}},
            {"sender": {**sender, "boot_id": rng.choice(["x", "x" * 129, ""])}},
            {
                "sender": {
                    **sender,
                    "address": rng.choice(["127.0.0.1:1", "127.0.0.1:99999", "a:0", "-:1", "127.0.0.1"]),
                }
            },
        ]
    )


def _again(rng: random.Random, draft: _Draft) -> None:
    """Over and over, as fast as it can be sent."""
    draft.copies = log_uniform(rng, 2000)


def _broken(rng: random.Random, draft: _Draft) -> None:
    """The bytes are spoilt once they are made, or come in several parts."""
    noise = rng.randbytes(log_uniform(rng, 4000))
    at = rng.random()
    draft.parts = rng.choice(
        [
            lambda data: (data[: int(at * len(data))],),
            lambda data: (data[: int(at * len(data))] + noise[:1] + data[int(at * len(data)) + 1 :],),
            lambda data: (data + noise,),
            lambda data: (noise,),
            lambda data: (b"",),
            lambda data: (data, data, b"", noise),
            lambda data: (b"",) * 1000,
            lambda data: (b"\x91" * len(noise) * 100,),
        ]
    )


_EXTREMES: dict[Callable[[random.Random, _Draft], object], int] = {
    _nothing: 3,
    _number: 4,
    _penalty: 2,
    _count: 4,
    _settings: 1,
    _anything: 4,
    _fields: 1,
    _header: 2,
    _again: 1,
    _broken: 1,
}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers in a frame, and each key or index in them."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value[:50])):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
