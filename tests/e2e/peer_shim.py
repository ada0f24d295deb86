"""Makes the peer's HTTP test kits importable without the peer's engine.

The kits are unittest mixins inside SGLang's wheel that talk to a server over plain HTTP. `sglang.test` is run as
shipped; every other `sglang.*` module, and packages that only its engine needs, are answered by permissive stubs, with
real stand-ins for the few names that tests call. The wheel is fetched with pip once (run this file, as `make test`
does) and never becomes part of us.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
CACHE = Path.home() / ".cache" / "exactspec" / f"sglang-{VERSION}"
REAL = ("sglang.test", "sglang.benchmark")
FOLDERS = tuple(f"{name.replace('.', '/')}/" for name in REAL)  # all that is unpacked
STUBBED = {
    "torch", "torchvision", "triton", "sgl_kernel", "flashinfer", "IPython", "zmq", "datasets", "sgl_eval", "anthropic",
    "decord", "soundfile", "scipy", "pandas", "pybase64", "orjson", "aiohttp", "PIL", "yaml", "tabulate",
}  # fmt: skip


def is_here() -> bool:
    return (CACHE / "sglang" / "test" / "kits").is_dir()


def fetch() -> Path | None:
    """The folder of the unpacked wheel; None when it is not here and cannot be fetched."""
    if is_here():
        return CACHE
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), f"sglang=={VERSION}"]
    wheels = [] if subprocess.run(command, check=False).returncode else list(CACHE.glob("*.whl"))
    if not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(CACHE, [name for name in archive.namelist() if name.startswith(FOLDERS)])
    wheels[0].unlink()
    return CACHE


class _Anything(type):
    """A class that puts up with whatever import-time code does to it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType)
        return args[0] if is_decorator else cls

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: Any) -> bool:
        return False


def anything(name: str) -> Any:
    return _Anything(name, (), {})


class _Module(types.ModuleType):
    def __init__(self, name: str, names: dict[str, Any] | None) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__all__: list[str] = []
        self.__dict__.update(names or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = anything(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, names: dict[str, dict[str, Any]]) -> None:
        self.root = root
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.split(".")[0]
        if top == "sglang":
            return self._peer_spec(fullname)
        missing = top in STUBBED and importlib.machinery.PathFinder.find_spec(top) is None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if missing and self._asked() else None

    def _peer_spec(self, fullname: str) -> Any:
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if not any(fullname == name or fullname.startswith(name + ".") for name in REAL):
            return spec
        place = self.root.joinpath(*fullname.split("."))
        if place.is_dir():
            if (place / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    fullname, place / "__init__.py", submodule_search_locations=[str(place)]
                )
            spec.submodule_search_locations = [str(place)]
        elif place.with_suffix(".py").is_file():
            return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))
        return spec

    def _asked(self) -> bool:
        """Only the peer's files get stubs: installed libraries that probe for packages keep seeing the truth."""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith("<frozen importlib") and f"{os.sep}importlib{os.sep}" not in file:
                return file.startswith(str(self.root))
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name, self.names.get(spec.name))

    def exec_module(self, module: types.ModuleType) -> None:
        return None


class _Variable:
    def get(self, *_: Any, **__: Any) -> None:
        return None

    def override(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()


class _Variables:
    def __getattr__(self, _: str) -> _Variable:
        return _Variable()


def install(root: Path, tokenizer: str) -> None:
    """After this, `import sglang.test.kits.X` works in this process."""
    from transformers import AutoTokenizer  # before the stubs, so that it finds out what is really installed

    common = {
        "get_bool_env_var": lambda name, default="false": os.environ.get(name, default).lower() in ("1", "true"),
        "get_device": lambda *_, **__: "cpu",
        "is_cuda": lambda *_, **__: False,
        "is_xpu": lambda *_, **__: False,
        "is_hip": lambda *_, **__: False,
        "is_blackwell": lambda *_, **__: False,
        "kill_process_tree": lambda *_, **__: None,
        "retry": lambda function, *_, **__: function(),
    }
    names = {
        "sglang.srt.utils": common,
        "sglang.srt.utils.common": common,
        "sglang.srt.utils.hf_transformers_utils": {
            "get_tokenizer": lambda *_, **__: AutoTokenizer.from_pretrained(tokenizer)
        },
        "sglang.srt.utils.network": {"resolve_base_url": lambda url, host, port: url or f"http://{host}:{port}"},
        "sglang.srt.environ": {"envs": _Variables()},
        "sglang.utils": {"normalize_base_url": lambda url, *_, **__: str(url).rstrip("/")},
    }
    os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
    sys.meta_path.insert(0, _Finder(root, names))


if __name__ == "__main__":
    sys.exit(0 if fetch() else 77)
