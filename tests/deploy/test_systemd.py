"""The units: accepted by systemd, with command lines that the program accepts, on ports that do not collide."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from tests.deploy.program import DEPLOY, CommandLine, default, read_shell
from tests.deploy.rendered import every_role

SYSTEMD = DEPLOY / "systemd"
UNITS = {
    "gateway": "hisparse-pd-gateway.service",
    "prefill": "hisparse-pd-prefill@.service",
    "decode": "hisparse-pd-decode@.service",
}
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


class Unit(RawConfigParser):
    """The [Service] section of a unit; of a setting that is repeated, the last."""

    def __init__(self, role: str) -> None:
        super().__init__(strict=False, delimiters=("=",), inline_comment_prefixes=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.text = (SYSTEMD / UNITS[role]).read_text()
        self.read_string(self.text.replace("\\\n", " "))

    def __getitem__(self, name: str) -> str:  # type: ignore[override]
        return self.get("Service", name)


def command_line(role: str, instance: int = 0) -> CommandLine:
    """What the unit runs, by the example of its environment file."""
    words = dict(line.partition("=")[::2] for line in _settings(SYSTEMD / f"{role}.env"))
    line = Unit(role)["ExecStart"].replace("%i", str(instance))
    line = re.sub(r"\$\{(\w+)\}", lambda match: words[match[1]], line)
    return read_shell(line.replace("$OPTIONS", words["OPTIONS"]))


@needs_systemd
@every_role
def test_systemd_accepts_the_unit(role: str, tmp_path: Path) -> None:
    """With the file for the network, and with another program: systemd looks whether there is one."""
    unit = tmp_path / UNITS[role]
    unit.write_text(Unit(role).text.replace("/opt/hisparse-pd/bin/hisparse-pd", sys.executable))
    (tmp_path / f"{unit.name}.d").mkdir()
    shutil.copy(SYSTEMD / "10-network.conf", tmp_path / f"{unit.name}.d")
    named = str(unit).replace("@.", "@0.")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@every_role
def test_the_unit_is_sandboxed(role: str) -> None:
    """By systemd's own count of what is left open: 0 is nothing, 10 everything. A GPU and a JIT take their part."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=45", str(SYSTEMD / UNITS[role])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every_role
def test_the_program_accepts_the_command_line(role: str) -> None:
    line = command_line(role)
    assert line.command == role
    assert Unit(role)["User"] != "root"
    assert set(re.findall(r"\$\{?(\w+)", Unit(role)["ExecStart"])) == _env(role).keys()
    assert f"EnvironmentFile=/etc/hisparse-pd/{role}.env\n" in Unit(role).text
    if role != "gateway":
        assert line.values["device"] == "cuda:0"
        assert line.values["gateways"] == [f"{_env('gateway')['HOST']}:{default('gateway', 'control_port')}"]
    if role == "decode":
        assert json.loads(line.values["hisparse_config"])["host_pool_gib"] > 0


@every_role
def test_a_unit_has_time_to_drain(role: str) -> None:
    assert float(Unit(role)["TimeoutStopSec"]) >= float(command_line(role).values["drain_timeout"]) + 20


def test_eight_nodes_of_each_kind_fit_on_a_machine() -> None:
    taken: list[int] = [default("gateway", "port"), default("gateway", "control_port")]
    for role in ("prefill", "decode"):
        for instance in range(8):
            line = command_line(role, instance)
            least, _, most = line.values["transfer_ports"].partition("-")
            taken += [line.values["port"], line.values["control_port"], *range(int(least), int(most) + 1)]
    assert len(taken) == len(set(taken))
    assert max(taken) < 32768, "systems hand out the ports above for outgoing connections"


def _settings(path: Path) -> list[str]:
    """KEY=VALUE with the value quoted for a shell, as it is for systemd."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(len(shlex.split(line.partition("=")[2])) <= 1 for line in lines)
    return lines


def _env(role: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in _settings(SYSTEMD / f"{role}.env"))


def test_the_firewall_recipe_confines_the_ports_of_units_and_defaults() -> None:
    """Whoever loads it without setting the range must not leave a port open."""
    recipe = (DEPLOY / "nftables/hisparse-pd.nft").read_text()
    first, last = map(int, re.findall(r"^define transfer_ports = (\d+)-(\d+)$", recipe, flags=re.MULTILINE)[0])
    for role in ("prefill", "decode"):
        ranges = [command_line(role, instance).values["transfer_ports"] for instance in range(8)]
        for given in (*ranges, default(role, "transfer_ports")):
            low, high = map(int, given.split("-"))
            assert first <= low <= high <= last
