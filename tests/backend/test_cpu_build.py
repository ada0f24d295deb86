"""Building the native library: the cache, the lock and the errors; and the kernels of lesser CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exactspec.backend.cpu import build
from exactspec.backend.cpu.backend import CpuBackend
from exactspec.errors import DeviceError


def test_a_second_start_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library_path()

    def must_not_compile(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", must_not_compile)
    assert build.library_path() == first


def test_whatever_changes_the_code_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    keys = {
        build.build_key(compiler, build.BASE_FLAGS),
        build.build_key(compiler, (*build.BASE_FLAGS, "-march=native")),
    }
    for path in build.SOURCE_DIR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.build_key(compiler, build.BASE_FLAGS) in keys
    (tmp_path / "noise.cpp").open("a").write("// changed\n")
    keys.add(build.build_key(compiler, build.BASE_FLAGS))
    monkeypatch.setattr(build, "_cpu_identity", lambda: "another CPU")
    keys.add(build.build_key(compiler, build.BASE_FLAGS))
    assert len(keys) == 4


def test_no_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler found \(no-such-compiler\).*CXX"):
        build.library_path()


def test_a_failing_compile_shows_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int broken( { }\n")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    monkeypatch.setenv("EXACTSPEC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DeviceError, match=r"compiling failed(.|\n)*broken\.cpp:1"):
        build.library_path()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_threads_rest_when_idle() -> None:
    """Half a second after a call the team sleeps: CPU time of the process hardly moves."""
    import time

    import torch

    backend = CpuBackend(4)
    backend.make_linear(torch.ones(512, 512))(torch.ones(1, 512))
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    backend.set_num_threads(2)


def test_a_forked_child_gets_a_team_of_its_own() -> None:
    script = (
        "import os, torch\n"
        "from exactspec.backend.cpu.backend import CpuBackend\n"
        "f = CpuBackend(2).make_linear(torch.ones(512, 512))\n"
        "f(torch.ones(1, 512))\n"
        "pid = os.fork()\n"
        "ok = bool((f(torch.ones(3, 512)) == 512).all())\n"
        "if pid == 0: os._exit(0 if ok else 1)\n"
        "assert ok and os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="x86 instruction sets")
@pytest.mark.parametrize(("arch", "name"), [("x86-64-v4", "avx512"), ("x86-64-v3", "avx2"), ("x86-64", "portable")])
def test_lesser_instruction_sets_pass_the_same_tests(arch: str, name: str) -> None:
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("x86 instruction sets")
    environment = {**os.environ, "EXACTSPEC_NATIVE_ARCH": arch}
    show = "from exactspec.backend.cpu.backend import CpuBackend as B; print(B().instruction_set)"
    done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=False)
    if "Illegal" in done.stderr or done.returncode < 0:
        pytest.skip(f"this CPU cannot run {arch}")
    assert done.stdout.split() == [name]
    files = [str(Path(__file__).with_name(f"test_cpu_{part}.py")) for part in ("stack", "linear", "noise", "reduce")]
    subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", *files], env=environment, check=True, timeout=280)
