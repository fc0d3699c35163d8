"""Compiles the kernels of csrc/ with NVRTC, a library that needs no GPU, and caches the machine code on disk."""

import hashlib
import os
import tempfile
from pathlib import Path

import structlog
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from kernels.specialization import CSRC, Specialization

log = structlog.get_logger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel: a bug in csrc/, or an NVRTC that does not know the architecture."""


def cubin(specialization: Specialization, architecture: str) -> bytes:
    """Machine code of a specialised kernel for an architecture such as "sm_90".

    Read from the user's cache directory, else compiled (some 0.5 s) and written there. A file's name has a
    digest of everything that the code depends on, so no file goes stale. A file begins with a digest of the rest, so
    that a damaged one is noticed and replaced. Raises KernelCompileError.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "hisparse-pd" / "kernels" / f"{specialization.entry}-{_key(specialization, architecture)}.cubin"
    code = _read(path)
    if code is None:
        code = compile_kernel(specialization, architecture)
        _write(path, code)
    return code


def compile_kernel(specialization: Specialization, architecture: str) -> bytes:
    """Compile without looking at the disk cache. Raises KernelCompileError with NVRTC's log."""
    options = ProgramOptions(
        name=specialization.source,
        arch=architecture,
        std="c++17",
        include_path=[str(CSRC)],
        define_macro=list(specialization.defines().items()),
    )
    source = (CSRC / specialization.source).read_text()
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core has several types for it, none of them public
        raise KernelCompileError(
            f"NVRTC {_nvrtc_version()} cannot compile {specialization} for {architecture}: {error}"
        ) from error


def _key(specialization: Specialization, architecture: str) -> str:
    digest = hashlib.sha256(f"{architecture}\n{_nvrtc_version()}\n".encode())
    for name, value in sorted(specialization.defines().items()):
        digest.update(f"{name}={value}\n".encode())
    for path in [CSRC / specialization.source, *sorted(CSRC.glob("*.cuh"))]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _nvrtc_version() -> str:
    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"NVRTC does not say its version: {error}")
    return f"{major}.{minor}"


def _read(path: Path) -> bytes | None:
    """The code in a cache file, None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Write code to the cache, whole or not at all: several processes may write at once, and may be killed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            whole = Path(directory) / path.name
            whole.write_bytes(hashlib.sha256(code).digest() + code)
            whole.replace(path)
    except OSError as error:  # the kernel will be compiled again next time
        log.warning("compiled kernel not cached", path=str(path), error=str(error))
