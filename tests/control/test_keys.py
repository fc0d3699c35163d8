"""Key directories: what keygen writes, and what a process takes."""

import os
import stat
from pathlib import Path

import pytest
import zmq.auth

from base.errors import StartupError
from cli.main import main
from control.keys import AllowList, generate_node, load_keys, load_token

SECRETS = ("cluster.key_secret", "gateway.key_secret", "prefill.key_secret", "decode.key_secret", "operator.token")


def keygen(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keygen", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_role_has_its_own_key_and_all_have_the_cluster_s(keys: Path) -> None:
    loaded = [load_keys(keys, role) for role in ("gateway", "prefill", "decode")]
    assert len({one.cluster for one in loaded}) == 1
    assert len({one.own.public for one in loaded} | {loaded[0].cluster.public}) == 4
    assert loaded[1].allowed.role_of(loaded[2].own.public) == "decode"
    assert loaded[1].allowed.role_of(loaded[2].cluster.public) is None
    assert len(load_token(keys)) >= 40
    assert mode(keys) == 0o700
    assert {mode(keys / name) for name in SECRETS} == {0o600}
    assert not any(secret in repr(loaded) for one in loaded for secret in (one.own.secret, one.cluster.secret))


def test_keys_are_never_overwritten(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert keygen(keys) == 2
    assert "is there already; keys are never overwritten" in capsys.readouterr().err
    for name in SECRETS[:-1]:
        (keys / name).unlink()
    assert keygen(keys) == 2, "some are left"
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}.items() <= before.items()


def test_a_key_for_one_node(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keygen(keys, "--node", "prefill:prefill-7", "--node", "decode:decode-7") == 0
    secret = keys / "nodes" / "prefill-7" / "prefill.key_secret"
    assert str(secret) in capsys.readouterr().out
    assert mode(secret) == 0o600
    before = load_keys(keys, "prefill").own.public
    secret.replace(keys / "prefill.key_secret")
    own = load_keys(keys, "prefill").own.public
    assert own != before
    assert AllowList(keys / "allowed").role_of(own) == "prefill"
    assert keygen(keys, "--node", "prefill:prefill-7") == 2


@pytest.mark.parametrize("node", ["prefill-7", "king:x", "prefill:", "prefill:a/b", "prefill:..", "decode:gateway"])
def test_a_node_that_cannot_be(keys: Path, node: str) -> None:
    with pytest.raises(StartupError):
        generate_node(keys, node)
    assert len(list(keys.rglob("*.key"))) == 4


def test_a_secret_that_everybody_reads_is_refused(keys: Path) -> None:
    for name in SECRETS:
        (keys / name).chmod(0o604)
        with pytest.raises(StartupError, match=rf"chmod o-rwx .*{name}"):
            load_token(keys) if name == "operator.token" else load_keys(
                keys, name.split(".")[0].replace("cluster", "decode")
            )  # type: ignore[arg-type]
        # As Kubernetes mounts a Secret for a group.
        (keys / name).chmod(0o440)
    load_keys(keys, "decode")
    load_token(keys)


@pytest.mark.parametrize("name", SECRETS[:-1])
@pytest.mark.parametrize("damage", ["gone", "empty", "not text", "short", "another secret"])
def test_a_damaged_key_is_one_line_that_does_not_tell_it(keys: Path, name: str, damage: str) -> None:
    path = keys / name
    text = path.read_text()
    secret = text.split('"')[3]
    other = zmq.curve_keypair()[1].decode()
    contents = {
        "empty": b"",
        "not text": os.urandom(200),
        "short": text.replace(secret, secret[:-1]).encode(),
        "another secret": text.replace(secret, other).encode(),
    }
    path.unlink() if damage == "gone" else path.write_bytes(contents[damage])
    role = "gateway" if name.startswith("cluster") else name.split(".")[0]
    with pytest.raises(StartupError, match=name) as caught:
        load_keys(keys, role)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert secret[:10] not in message
    assert other not in message


def test_a_key_that_others_would_refuse_is_said_at_start(keys: Path) -> None:
    (keys / "allowed" / "prefill.key").unlink()
    with pytest.raises(StartupError, match=r"is not among the keys in .*allowed"):
        load_keys(keys, "prefill")
    (keys / "prefill.key_secret").write_text((keys / "decode.key_secret").read_text())
    with pytest.raises(StartupError, match="is that of a decode process"):
        load_keys(keys, "prefill")


def test_the_allowed_keys_are_those_of_the_moment(keys: Path) -> None:
    allowed = AllowList(keys / "allowed")
    public = load_keys(keys, "prefill").own.public
    path = keys / "allowed" / "prefill.key"
    text = path.read_text()
    path.unlink()
    allowed.refresh()
    assert allowed.role_of(public) is None
    path.write_text(text.replace("prefill", "decode"))
    allowed.refresh()
    assert allowed.role_of(public) == "decode"
    path.write_text("nonsense")
    allowed.refresh()
    assert allowed.role_of(public) is None
    assert allowed.role_of(load_keys(keys, "gateway").own.public) == "gateway"


def test_a_key_is_known_by_its_file_also_when_that_is_gone(keys: Path) -> None:
    """Who reads the log of what a revoked key did knows nodes by these names."""
    generate_node(keys, "prefill:prefill-7")
    own = (keys / "nodes" / "prefill-7" / "prefill.key_secret").read_text().split('"')[1]
    allowed = AllowList(keys / "allowed")
    assert (allowed.role_of(own), allowed.file_of(own)) == ("prefill", "prefill-7.key")
    (keys / "allowed" / "prefill-7.key").unlink()
    allowed.refresh()
    assert (allowed.role_of(own), allowed.file_of(own)) == (None, "prefill-7.key")
    assert allowed.file_of("never seen") is None


def test_while_the_directory_cannot_be_read_what_was_read_last_stands(keys: Path) -> None:
    allowed = AllowList(keys / "allowed")
    public = load_keys(keys, "prefill").own.public
    (keys / "allowed").rename(keys / "elsewhere")
    allowed.refresh()
    assert allowed.role_of(public) == "prefill"


@pytest.mark.parametrize("in_the_way", ["folder", "link to nothing"])
def test_what_is_no_file_does_not_keep_the_directory_from_being_read(keys: Path, in_the_way: str) -> None:
    allowed = AllowList(keys / "allowed")
    public = load_keys(keys, "prefill").own.public
    other = keys / "allowed" / "other.key"
    other.mkdir() if in_the_way == "folder" else other.symlink_to("nothing")
    (keys / "allowed" / "prefill.key").unlink()
    allowed.refresh()
    assert allowed.role_of(public) is None
    assert load_keys(keys, "decode").allowed.role_of(public) is None


def test_a_file_that_may_be_read_from_now_on_is_read(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = load_keys(keys, "prefill").own.public
    path, read_text = keys / "allowed" / "prefill.key", Path.read_text

    def refuse(file: Path) -> str:
        if file == path:
            raise PermissionError
        return read_text(file)

    with monkeypatch.context() as denied:  # whoever runs the tests may be allowed to read everything
        denied.setattr(Path, "read_text", refuse)
        allowed = AllowList(keys / "allowed")
    assert allowed.role_of(public) is None
    path.chmod(0o640)
    allowed.refresh()
    assert allowed.role_of(public) == "prefill"


def test_keys_behind_kubernetes_links(keys: Path, tmp_path: Path) -> None:
    """A Secret volume is exchanged as a whole, by a link."""
    for version in ("v1", "v2"):
        (tmp_path / version / "allowed").mkdir(parents=True)
    file = keys / "allowed" / "prefill.key"
    (tmp_path / "v1" / "allowed" / "prefill.key").write_text(file.read_text())
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "allowed").symlink_to("..data/allowed")
    allowed = AllowList(tmp_path / "allowed")
    public = load_keys(keys, "prefill").own.public
    assert allowed.role_of(public) == "prefill"
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    allowed.refresh()
    assert allowed.role_of(public) is None
