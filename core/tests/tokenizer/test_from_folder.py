"""Tokenizers of Hugging Face folders, against transformers on the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader import load_tokenizer
from inferplane.models.source import ModelSource
from inferplane.tokenizer import Tokenizer
from texts import CORPUS


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource(folder.name, "folder", folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.write_tokenizer(tmp_path)
    return tmp_path


def change(folder: Path, name: str, **fields: Any) -> None:
    """A value of None takes the key out."""
    path = folder / name
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    table = {key: value for key, value in {**table, **fields}.items() if value is not None}
    path.write_text(json.dumps(table), "utf-8")


def theirs_of(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same(folder: Path, *texts: str) -> None:
    theirs, ours = theirs_of(folder), tokenizer_from_folder(folder)
    for text in [*CORPUS, *texts]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


def test_a_plain_folder(folder: Path) -> None:
    assert_same(folder, "<|im_start|>user\nhi<|im_end|>", "a<|endoftext|>")


@pytest.mark.parametrize(
    "flags",
    [
        {"add_bos_token": True, "bos_token": tiny_models.TURN_START},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": tiny_models.TURN_START},
    ],
)
def test_flags_of_older_forms_change_nothing(folder: Path, flags: dict[str, Any]) -> None:
    change(folder, "tokenizer_config.json", **flags)
    assert_same(folder)


def test_tokenizer_json_says_what_is_put_around_a_text(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    surroundings = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    backend.post_processor = TemplateProcessing(
        single=["<|im_start|>", "$A", "<|im_end|>"], special_tokens=surroundings
    )
    backend.save(str(folder / "tokenizer.json"))
    assert_same(folder)
    assert tokenizer_from_folder(folder).encode("") == [1, 2]


def test_special_tokens_as_objects_and_in_a_file_of_their_own(folder: Path) -> None:
    written = {
        "content": "<|im_start|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    change(folder, "tokenizer_config.json", eos_token=None, bos_token={**written, "__type": "AddedToken"})
    change(
        folder,
        "special_tokens_map.json",
        eos_token=written | {"content": "<|im_end|>"},
        bos_token="<|endoftext|>",
    )
    ours = tokenizer_from_folder(folder)
    assert ours.special_tokens["bos_token"] == "<|im_start|>"
    assert ours.special_tokens["eos_token"] == "<|im_end|>"


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    new = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {
        "1024": {**new, "content": "<tool>", "special": False},
        "1025": {**new, "content": "<image>", "special": True},
    }
    change(folder, "tokenizer_config.json", added_tokens_decoder=decoder)
    assert_same(folder, "a<tool>b <image> c")
    ours = tokenizer_from_folder(folder)
    assert ours.token_to_id("<tool>") == 1024 and ours.token_to_id("<image>") == 1025
    assert ours.decode([1024, 1025]) == "<tool>"


def test_further_special_tokens(folder: Path) -> None:
    change(folder, "tokenizer_config.json", additional_special_tokens=["<extra_1>", "<extra_2>"])
    assert_same(folder, "x<extra_2>y<extra_1>")


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    table = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    table["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    table["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(table), "utf-8")
    ours = tokenizer_from_folder(folder)
    assert len(ours.encode("a b c d e f g h i j k l m n o p")) > 8
    assert len(ours.encode("a")) == 1
    texts = ["a", "a b c d e f g h i j k l"]
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, None, {2}),
        ([5, 6], 7, {2, 5, 6}),
        (5, None, {2, 5}),
        (None, 7, {2, 7}),
        (None, [7, 8], {2, 7, 8}),
        ([], 7, {2, 7}),
    ],
)
def test_end_tokens_are_those_of_the_settings_and_the_tokenizer(
    folder: Path, generation, model, expected
) -> None:
    change(folder, "generation_config.json", eos_token_id=generation)
    change(folder, "config.json", eos_token_id=model)
    assert tokenizer_from_folder(folder).eos_token_ids == expected


def test_a_bpe_of_two_files_is_converted(folder: Path) -> None:
    table = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(table["vocab"]), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, table["merges"])), "utf-8")
    change(folder, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", add_bos_token=None)
    assert_same(folder)


class TestRefusals:
    def test_no_tokenizer_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"has no tokenizer.json \(and none of tokenizer.model"):
            tokenizer_from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "Odd"}}'])
    def test_a_damaged_tokenizer_json(self, folder: Path, content: str) -> None:
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ModelLoadError, match=r"tokenizer.json: is no tokenizer that can be read"):
            tokenizer_from_folder(folder)

    def test_a_damaged_configuration(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelLoadError, match=r"tokenizer_config.json: is no valid JSON"):
            tokenizer_from_folder(folder)

    @pytest.mark.parametrize(
        "decoder", [[1], {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}, {"1": {"content": 2}}]
    )
    def test_damaged_added_tokens(self, folder: Path, decoder: Any) -> None:
        change(folder, "tokenizer_config.json", added_tokens_decoder=decoder)
        with pytest.raises(ModelLoadError, match="added_tokens_decoder should map ids"):
            tokenizer_from_folder(folder)

    def test_end_tokens_that_are_no_ids(self, folder: Path) -> None:
        change(folder, "generation_config.json", eos_token_id=["</s>"])
        with pytest.raises(ModelLoadError, match=r"generation_config.json: eos_token_id should be"):
            tokenizer_from_folder(folder)

    def test_a_tokenizer_model_that_cannot_be_converted(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"damaged")
        change(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
        with pytest.raises(
            ModelLoadError, match=r"has tokenizer.model but no tokenizer.json.*add the model's tokenizer.json"
        ):
            tokenizer_from_folder(tmp_path)


@pytest.fixture
def trapped(folder: Path) -> Callable[[], bool]:
    """A tokenizer that names code of its repository; tells whether that code has run."""
    marker = folder / "marker"
    (folder / "trap.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Tokenizer: pass\n")
    change(
        folder,
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["trap.Tokenizer", None]},
        tokenizer_class="Tokenizer",
    )
    return marker.exists


def test_code_of_the_repository_is_not_needed_where_there_is_a_tokenizer_json(folder: Path, trapped) -> None:
    assert tokenizer_from_folder(folder).decode([5, 6]) != ""
    assert not trapped()


def test_code_of_the_repository_never_runs(folder: Path, trapped) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelLoadError, match=r"auto_map in tokenizer_config.json.*never runs here"):
        tokenizer_from_folder(folder)
    assert not trapped()


@pytest.mark.parametrize(
    "text", [*filter(None, CORPUS), "x" * 1000, " " * 500, "e\u0301" * 90, tiny_models.TURN_END * 50]
)
def test_the_floor_of_a_texts_length_is_one(folder: Path, text: str) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.min_num_tokens(text * 1000) > len(text) // 2


def test_a_tokenizer_that_may_drop_text_has_no_floor(folder: Path) -> None:
    change(folder, "tokenizer.json", normalizer={"type": "Strip", "strip_left": True, "strip_right": True})
    assert tokenizer_from_folder(folder).min_num_tokens(" " * 10**6) == 0
