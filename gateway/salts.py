"""Which requests share cached KV: those with the same salt."""

import hashlib


def salt_of(given: str | None, client_key: bytes | None) -> str:
    """The salt of a request for decode nodes. given: `cache_salt` of the body. client_key: None if all clients share.

    A digest, so that it tells nodes neither of the two, and that no body can name what another client's key makes.
    """
    if given is None and client_key is None:
        return ""
    salt = hashlib.sha256(b"hisparse-pd prefix cache")
    for part in (None if given is None else given.encode(), client_key):
        salt.update(b"-" if part is None else b"+" + len(part).to_bytes(8, "little") + part)
    return salt.hexdigest()
