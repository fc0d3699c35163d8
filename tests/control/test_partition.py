"""The control plane between two hosts that lose each other for a while."""

import time

import pytest

from control.plane import ControlPlane
from tests.e2e.cluster import wait_until
from tests.e2e.hosts import Network, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PARTITION_S = 13.5


@pytest.mark.slow
def test_processes_hear_each_other_soon_after_a_partition() -> None:
    """TCP would send again 12 s after this one has ended, and the longer one lasts, the later."""
    with Network("control") as network:
        hosts = [network.host(name) for name in ("one", "other")]
        planes = []
        for host in hosts:
            address = host.addresses["control"]
            with host.entered():
                planes.append(ControlPlane("prefill", address, 0, address, deliver=lambda sender, message: None))
                planes[-1].start()
        one, other = planes
        try:
            one.watch([other.me])
            wait_until(lambda: one.silence(other.me) < 1, what="an answer")
            network.part(*hosts)
            wait_until(lambda: one.silence(other.me) > PARTITION_S, PARTITION_S + 5)
            since = time.monotonic()
            network.join(*hosts)
            wait_until(lambda: (one.last_heard(other.me.boot_id) or 0) > since, 8, "an answer after the partition")
        finally:
            one.stop()
            other.stop()
