"""Orders and reports as bytes, for the lines between ranks: msgpack of their kind and their fields."""

from typing import Any, Generic, TypeVar, get_args

import msgpack
from pydantic import TypeAdapter

from prefill_node.ranks.orders import Order, PartReport
from ranks.rank_line import LineCodec

KindT = TypeVar("KindT")


class DataclassCodec(Generic[KindT]):
    """Values of some dataclasses as bytes, each with the name of its class."""

    def __init__(self, kinds: tuple[type[KindT], ...]) -> None:
        self._kinds = {kind.__name__: TypeAdapter(kind) for kind in kinds}

    def encode(self, value: KindT) -> bytes:
        kind = type(value).__name__
        packed: bytes = msgpack.packb((kind, self._kinds[kind].dump_python(value)), default=_as_list)
        return packed

    def decode(self, data: bytes) -> KindT:
        """Raises ValueError if these are not the bytes of such a value, with fields of its types."""
        try:
            found: Any = msgpack.unpackb(data, use_list=False)
        except (TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"not msgpack: {error}") from error
        match found:
            case (str(kind), dict(fields)) if kind in self._kinds:
                return self._kinds[kind].validate_python(fields)
        raise ValueError(f"expected one of {', '.join(self._kinds)}, and its fields")


def _as_list(value: object) -> list[Any]:
    if isinstance(value, frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no part of an order or report")


_ORDERS = DataclassCodec[Order](get_args(Order))
_REPORTS = DataclassCodec[PartReport](get_args(PartReport))
OF_FIRST = LineCodec(_ORDERS.encode, _REPORTS.decode)
"""Rank 0 sends orders, and gets reports."""
OF_OTHERS = LineCodec(_REPORTS.encode, _ORDERS.decode)
