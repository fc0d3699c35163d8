"""Names of gateways become addresses, and stay so while nobody can say better."""

import threading
from collections.abc import Iterable

import pytest

from control import discovery
from control.discovery import GatewayAddresses, resolve
from tests.e2e.cluster import wait_until


class Names:
    """A name service whose answers a test decides; OSError for names that it does not have."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str) -> Iterable[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise OSError(f"{host} is unknown")
        return self.answers[host]


def test_a_name_stands_for_all_its_addresses() -> None:
    gateways = GatewayAddresses(["all:8001", "one:9001"], Names(all=["10.0.0.1", "10.0.0.2"], one=["10.0.0.3"]))
    assert gateways.expected
    assert gateways.current == frozenset()
    gateways.look_up()
    assert gateways.current == {"10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:9001"}


def test_numeric_addresses_are_known_at_once_and_never_looked_up() -> None:
    names = Names()
    gateways = GatewayAddresses(["10.0.0.1:8001"], names)
    gateways.start()
    gateways.look_up()
    gateways.stop()
    assert gateways.current == {"10.0.0.1:8001"}
    assert names.asked == []


def test_the_last_answer_stands_while_the_name_service_is_away() -> None:
    names = Names(all=["10.0.0.1"])
    gateways = GatewayAddresses(["all:8001"], names)
    gateways.look_up()
    names.answers = {}
    gateways.look_up()
    assert gateways.current == {"10.0.0.1:8001"}


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "x" * 64 + ".b", "."])
def test_a_name_that_nothing_can_have_is_one_that_cannot_be_looked_up(host: str) -> None:
    """Python calls it a UnicodeError, which ended the thread: no other name was looked up any more either."""
    with pytest.raises(OSError, match="is no host name"):
        resolve(host)
    gateways = GatewayAddresses([f"{host}:1", "localhost:8001"])
    gateways.look_up()
    assert gateways.current == {"127.0.0.1:8001"}


def test_names_are_looked_up_again_and_again_on_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup may hang for seconds, and nobody waits for it."""
    monkeypatch.setattr(discovery, "LOOK_UP_S", 0.01)
    names = Names()
    hanging = threading.Event()

    def resolver(host: str) -> Iterable[str]:
        hanging.wait(10)
        return names(host)

    gateways = GatewayAddresses(["all:8001"], resolver)
    gateways.start()
    try:
        assert gateways.current == frozenset()
        hanging.set()
        names.answers = {"all": ["10.0.0.1"]}
        wait_until(lambda: gateways.current == {"10.0.0.1:8001"})
        names.answers = {"all": ["10.0.0.2"]}
        wait_until(lambda: gateways.current == {"10.0.0.2:8001"})
    finally:
        gateways.stop()
