"""docs/protocol.md names what is on the wire."""

import re
from pathlib import Path

import pytest

from base.wire import WireModel
from control import messages
from control.codec import PROTOCOL_VERSION, Frame
from control.messages import AttemptId, AttemptMessage, Message
from transfer.memory import RemotePool

BASES = (RemotePool, AttemptMessage)
PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
SECTIONS = dict(re.findall(r"^#### (\w+)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
PARTS = {
    name: part
    for name, part in vars(messages).items()
    if isinstance(part, type) and issubclass(part, WireModel) and part.model_fields and part not in BASES
}


def named_in(section: str) -> set[str]:
    """The words in code of a section."""
    return set(re.findall(r"`(\w+)`", section))


def test_the_page_is_of_this_version() -> None:
    assert re.findall(r"PROTOCOL_VERSION = (\d+)", PAGE) == [str(PROTOCOL_VERSION)]
    assert f"# The wire protocol, version {PROTOCOL_VERSION}\n" in PAGE


@pytest.mark.parametrize("kind", Message.kinds)
def test_every_kind_has_a_section(kind: str) -> None:
    assert kind in SECTIONS


@pytest.mark.parametrize("name", [name for name in PARTS if name != "Identity"])
def test_every_field_is_named_in_its_section(name: str) -> None:
    assert PARTS[name].model_fields.keys() - named_in(SECTIONS[name]) == set()


def test_the_envelope_and_the_attempt_are_there() -> None:
    envelope = PAGE.partition("## 2. The envelope")[2].partition("####")[0]
    assert Frame.model_fields.keys() - named_in(envelope) == set()
    assert set(AttemptId._fields) - named_in(SECTIONS["AttemptId"]) == set()
