"""The keys of a cluster: what a key directory holds, how it is made and how a process reads it.

    cluster.key_secret    the cluster's key pair, by which mailboxes authenticate
    cluster.key           its public half, which no process needs
    ROLE.key_secret       a process's key pair, by which it authenticates to mailboxes
    allowed/NAME.key      the public keys that may connect, each with its role
    operator.token        the token for a decode node's /quarantine

The files have the format of pyzmq's zmq.auth. Errors do not quote their contents.
"""

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import structlog
import zmq

from base.errors import StartupError
from control.messages import Role

log = structlog.get_logger(__name__)

ROLES: tuple[Role, ...] = get_args(Role)
_FIELD = re.compile(r'^\s*([a-z-]+)\s*=\s*"?([^"\s]+)"?\s*$', re.MULTILINE)
_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A CURVE key in Z85."""
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, both halves in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """The keys that one process uses."""

    cluster: KeyPair
    own: KeyPair
    allowed: "AllowList"


class AllowList:
    """The public keys that may connect, as the files of a directory have them."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupError if the directory cannot be read."""
        self._directory = directory
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._roles: dict[str, Role] = {}
        self._files: dict[str, str] = {}
        try:
            self._read()
        except OSError as error:
            raise StartupError(f"cannot read the allowed keys in {directory}: {error.strerror}") from error

    def role_of(self, public: str) -> Role | None:
        """The role of a key, or None if it is not allowed."""
        return self._roles.get(public)

    def file_of(self, public: str) -> str | None:
        """The file that allows a key, or has allowed it while this process ran; None if there was none."""
        return self._files.get(public)

    def refresh(self) -> None:
        """Read the directory again if it changed. While it cannot be read, what was read last stands."""
        try:
            self._read()
        except OSError as error:
            log.error("cannot read the allowed keys", directory=str(self._directory), error=error.strerror)

    def _read(self) -> None:
        seen = {}
        for entry in os.scandir(self._directory):
            if entry.name.endswith(".key") and entry.is_file():
                stat = entry.stat()
                # The time of a change of the mode, too: it may make a file readable.
                seen[Path(entry.path)] = (stat.st_ino, stat.st_ctime_ns, stat.st_size)
        if seen == self._seen:
            return
        roles: dict[str, Role] = {}
        for path in sorted(seen):
            try:
                key, role = _allowed(path)
                roles[key] = role
                self._files[key] = path.name
            except StartupError as error:
                log.error("a file of the allowed keys is left out", error=str(error))
        self._seen, self._roles = seen, roles
        log.info("allowed keys", keys=len(roles))


def load_keys(directory: Path, role: Role) -> Keys:
    """The keys of a process of that role. Raises StartupError if one is missing, malformed or readable by everyone."""
    keys = Keys(
        cluster=_pair(directory / "cluster.key_secret"),
        own=_pair(directory / f"{role}.key_secret"),
        allowed=AllowList(directory / "allowed"),
    )
    found = keys.allowed.role_of(keys.own.public)
    if found != role:
        what = "is not among the keys" if found is None else f"is that of a {found} process"
        raise StartupError(
            f"{directory}/{role}.key_secret {what} in {directory}/allowed: others would refuse this process; "
            f"put its public key there, with role = {role}"
        )
    return keys


def cache_seed(keys: Keys | None) -> int:
    """The 64-bit seed of the hashes of cached blocks; 0 without keys."""
    return int.from_bytes(_derived(keys, b"block hashes", 8), "little")


def group_secret(keys: Keys | None) -> bytes:
    """32 bytes by which the ranks of several hosts authenticate each other; empty without keys."""
    return _derived(keys, b"rank groups", 32)


def _derived(keys: Keys | None, purpose: bytes, size: int) -> bytes:
    """Bytes that only processes with the cluster's keys can derive; empty without keys."""
    if keys is None:
        return b""
    return hashlib.blake2b(keys.cluster.secret.encode(), digest_size=size, person=purpose).digest()


def load_token(directory: Path) -> str:
    """The operator's token. Raises StartupError if it is missing, empty or readable by everyone."""
    path = directory / "operator.token"
    token = _read_secret(path).strip()
    if not token:
        raise StartupError(f"{path} is empty")
    return token


def generate(directory: Path) -> None:
    """Make the keys of a cluster and its roles, and the operator's token. Raises StartupError if a file exists."""
    cluster, own = _new_pair(), {role: _new_pair() for role in ROLES}
    secret_files = {directory / "cluster.key_secret": _secret_file(cluster)}
    secret_files |= {directory / f"{role}.key_secret": _secret_file(pair, role) for role, pair in own.items()}
    secret_files[directory / "operator.token"] = secrets.token_urlsafe(_TOKEN_BYTES) + "\n"
    public_files = {directory / "cluster.key": _public_file(cluster)}
    public_files |= {directory / "allowed" / f"{role}.key": _public_file(pair, role) for role, pair in own.items()}
    _write(directory, secret_files, public_files)


def generate_node(directory: Path, node: str) -> Path:
    """Make a key pair for one node, ROLE:NAME, to be revoked alone. Returns its secret's file. Raises StartupError."""
    role_name, _, name = node.partition(":")
    if (role := _role(role_name)) is None or not _NODE_NAME.fullmatch(name):
        raise StartupError(f"--node {node}: expected {'|'.join(ROLES)}, a colon and a name, such as prefill:prefill-7")
    if not (directory / "cluster.key_secret").exists():
        raise StartupError(f"{directory} has no cluster.key_secret; run `hisparse-pd keygen {directory}` first")
    pair, secret = _new_pair(), directory / "nodes" / name / f"{role}.key_secret"
    public = directory / "allowed" / f"{name}.key"
    _write(directory, {secret: _secret_file(pair, role)}, {public: _public_file(pair, role)})
    return secret


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _public_file(pair: KeyPair, role: Role | None = None) -> str:
    metadata = "metadata\n" + (f"    role = {role}\n" if role else "")
    return f'{metadata}curve\n    public-key = "{pair.public}"\n'


def _secret_file(pair: KeyPair, role: Role | None = None) -> str:
    return f'{_public_file(pair, role)}    secret-key = "{pair.secret}"\n'


def _write(directory: Path, secret_files: dict[Path, str], public_files: dict[Path, str]) -> None:
    present = [path for path in (*secret_files, *public_files) if path.exists()]
    if present:
        raise StartupError(f"{present[0]} is there already; keys are never overwritten")
    try:
        for files, mode in ((secret_files, 0o600), (public_files, 0o644)):
            for path, content in files.items():
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                    file.write(content)
    except OSError as error:
        raise StartupError(f"cannot write {error.filename}: {error.strerror}") from error


def _pair(path: Path) -> KeyPair:
    fields = dict(_FIELD.findall(_read_secret(path)))
    pair = KeyPair(_key(path, fields, "public-key"), _key(path, fields, "secret-key"))
    try:
        belongs = zmq.curve_public(pair.secret.encode()).decode() == pair.public
    except zmq.ZMQError:
        belongs = False
    if not belongs:
        raise StartupError(f"the two keys in {path} are not a pair")
    return pair


def _read_secret(path: Path) -> str:
    """The text of a file that only its owner or a group may read. Raises StartupError."""
    try:
        if path.stat().st_mode & 0o007:
            raise StartupError(f"every user of this machine can get at {path}; chmod o-rwx {path}")
        return path.read_text()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}; `hisparse-pd keygen` makes it") from error
    except UnicodeDecodeError:
        raise StartupError(f"{path} is not a text file; `hisparse-pd keygen` makes it") from None


def _allowed(path: Path) -> tuple[str, Role]:
    """The public key in a file of the allowed ones, and its role. Raises StartupError if it has not both."""
    try:
        fields = dict(_FIELD.findall(path.read_text()))
    except (PermissionError, UnicodeDecodeError):
        raise StartupError(f"{path} cannot be read") from None
    key = _key(path, fields, "public-key")
    if (role := _role(fields.get("role"))) is None:
        raise StartupError(f"{path} names no role; expected role = {'|'.join(ROLES)}")
    return key, role


def _key(path: Path, fields: dict[str, str], name: str) -> str:
    key = fields.get(name, "")
    if not _KEY.fullmatch(key):
        raise StartupError(f"{path} has no {name} of 40 characters")
    return key


def _role(name: str | None) -> Role | None:
    return next((role for role in ROLES if role == name), None)
