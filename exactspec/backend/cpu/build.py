"""Compiles the native CPU library on first use, for the very CPU it will run on, and caches it.

A shipped binary would have to be compiled for the oldest CPU; here the compiler sees the real one. The cache key
covers everything that can change the result: sources, flags, compiler and CPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from exactspec.errors import DeviceError

SOURCE_DIR = Path(__file__).parent / "src"
LIBRARY_NAME = "libexactspec_cpu.so"
COMPILERS = ("g++", "clang++", "c++")
# No contraction: the compiler may fuse a * b + c in one copy of a loop and not in another, and a row's bits would
# then depend on which copy computed it. Fused multiply-adds are written out in the sources.
BASE_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-fvisibility=hidden")


def cache_dir() -> Path:
    root = os.environ.get("EXACTSPEC_CACHE") or Path.home() / ".cache" / "exactspec"
    return Path(root) / "native"


def arch_flag() -> str:
    """Instruction set: the machine's own, or EXACTSPEC_NATIVE_ARCH (e.g. "x86-64-v3") to compile for less."""
    chosen = os.environ.get("EXACTSPEC_NATIVE_ARCH", "native")
    return f"-march={chosen}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={chosen}"


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise DeviceError(
        f"cpu backend: no C++ compiler found ({wanted or ', '.join(COMPILERS)}). Install g++ or clang++, set CXX, "
        "or set EXACTSPEC_BACKEND=torch to run without native code."
    )


def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise DeviceError(f"cpu backend: cannot run the compiler: {error}") from error
    if done.returncode != 0:
        raise DeviceError(f"cpu backend: compiling failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout


def build_key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*flags, _run([compiler, "--version"]), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", out] for source, out in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        built = Path(work) / LIBRARY_NAME
        _run([compiler, *flags, "-shared", *objects, "-o", str(built)])
        os.replace(built, target)  # others see the whole file or none


def library_path() -> Path:
    """The compiled library; compiles it when the cache has none. Raises DeviceError with the compiler's words."""
    compiler = find_compiler()
    flags = (*BASE_FLAGS, arch_flag())
    folder = cache_dir() / build_key(compiler, flags)
    target = folder / LIBRARY_NAME
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            if not target.exists():
                _compile(compiler, flags, target)
    except OSError as error:
        raise DeviceError(f"cpu backend: cannot write the native cache {folder}: {error}") from error
    return target
