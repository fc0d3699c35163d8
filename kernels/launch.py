"""Kernels of csrc/: compiled with NVRTC, which needs no GPU, cached on disk, loaded on a device and launched."""

import ctypes
import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import structlog
import torch
from cuda.bindings import driver, nvrtc
from cuda.core import ObjectCode, Program, ProgramOptions

from kernels.specialization import CSRC, PORTABLE_CLUSTER, Specialization

log = structlog.get_logger(__name__)

_CLUSTER_SIZES = (2, 4, 8, 16)
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel: a bug in csrc/, or an NVRTC that does not know the architecture."""


class CudaError(RuntimeError):
    """The CUDA driver refused something."""


class DeviceKernel:
    """A specialised kernel, loaded on a device.

    Its parameters are one struct by value, passed as a ctypes.Structure. Construct and launch it in a thread that has
    used torch on the device, so that the device's primary context is current. From Hopper on, launches are chained, as
    `kernels.triton.launch` says.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        self.specialization = specialization
        major, minor = torch.cuda.get_device_capability(device)
        self._from_hopper = major >= 9
        architecture = f"sm_{major}{minor}{specialization.architecture_features}"
        self._code = ObjectCode.from_cubin(cubin(specialization, architecture))  # keeps the kernel loaded
        self._kernel = self._code.get_kernel(specialization.entry)
        self._function = driver.CUfunction(int(self._kernel.handle))
        attributes = driver.CUfunction_attribute
        if specialization.shared_bytes:
            self._set(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, specialization.shared_bytes, device)
        if self._from_hopper and specialization.max_cluster > PORTABLE_CLUSTER:
            self._set(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, device)
        self._configs: dict[tuple[tuple[int, int, int], int, int], Any] = {}

    def launch(
        self,
        params: ctypes.Structure,
        grid: tuple[int, int, int],
        cluster: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        """Launch on torch's current stream. grid: blocks in x (a multiple of `cluster`), y and z. shared_bytes: of
        dynamic shared memory, all that the specialization has if None.

        Nothing waits, so a launch may be captured in a graph. `params` is copied before this returns.
        """
        shared_bytes = self.specialization.shared_bytes if shared_bytes is None else shared_bytes
        config = self._configs.get((grid, cluster, shared_bytes))
        if config is None:
            config = self._configs[grid, cluster, shared_bytes] = self._config(grid, cluster, shared_bytes)
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def cluster_sizes(self) -> dict[int, int]:
        """By cluster size (blocks, above 1): how many such clusters the device runs at a time."""
        sizes: dict[int, int] = {}
        for cluster in _CLUSTER_SIZES if self._from_hopper else ():
            if cluster > self.specialization.max_cluster:
                break
            config = self._config((cluster, 1, 1), cluster, self.specialization.shared_bytes)
            result = driver.cuOccupancyMaxActiveClusters(self._function, config)
            if cluster > PORTABLE_CLUSTER and result[0] == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
                break  # no such clusters on this device
            sizes[cluster] = int(_check(result)[0])
        return sizes

    def _set(self, attribute: Any, value: int, device: torch.device) -> None:
        _check(driver.cuKernelSetAttribute(attribute, value, self._kernel.handle, driver.CUdevice(device.index)))

    def _config(self, grid: tuple[int, int, int], cluster: int, shared_bytes: int) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.specialization.block_size, 1, 1
        config.sharedMemBytes = shared_bytes
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = 1
            attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if self._from_hopper:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        return config


@functools.cache
def kernel_on(device: torch.device, specialization: Specialization) -> DeviceKernel:
    """The kernel of a device, loaded once. While a graph is captured nothing can be loaded: ask for it before."""
    return DeviceKernel(specialization, device)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_hopper(device: torch.device) -> bool:
    """Whether the device has what some kernels use: warpgroup products and a copy engine, as Hopper has them."""
    return torch.cuda.get_device_capability(device)[0] == 9


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may have."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(_check(driver.cuDeviceGetAttribute(attribute, driver.CUdevice(device.index)))[0])


def reads_registered_memory(device: torch.device) -> bool:
    """Whether kernels may use host pointers to memory that was registered with CUDA as they are."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    return bool(_check(driver.cuDeviceGetAttribute(attribute, driver.CUdevice(device.index)))[0])


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned, without the error code. Raises CudaError."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        _, text = driver.cuGetErrorString(error)
        raise CudaError(f"{name.decode()}: {text.decode()}")
    return tuple(values)


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
