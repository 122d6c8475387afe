"""Tokenizers rebuilt from GGUF metadata give the ids of the originals."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

import gguf_files
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.gguf_reader import GGUFReader
from inferplane.tokenizer import Tokenizer
from inferplane.tokenizer.from_gguf import tokenizer_from_gguf
from texts import CORPUS

SPECIAL = ["<|begin|>", "<|end|>"]
THINK = "<think>"
MIXED = "hello<|begin|>world <|end|> <think>12</think>"

# The rules as the families' own tokenizer.json files spell them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    "default": {},
    "smollm": {"digits": True},
    "starcoder": {"digits": True},
    "llama-bpe": {"pattern": LLAMA3, "ignore_merges": True},
    "qwen2": {"pattern": QWEN2, "nfc": True},
    "tekken": {"pattern": TEKKEN, "ignore_merges": True},
}


def original_bpe(
    pattern: str | None = None, digits: bool = False, nfc: bool = False, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of a family, trained on the corpus."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)] if pattern else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    license_text = Path(__file__).parents[3].joinpath("LICENSE").read_text(encoding="utf-8")
    backend.train_from_iterator([*CORPUS * 3, license_text], trainer)
    backend.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    return backend


def rebuilt(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = gguf_files.write_gguf(tmp_path / "vocabulary.gguf", metadata)
    return tokenizer_from_gguf(GGUFReader(path).metadata)


def bpe_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    metadata = gguf_files.bpe_metadata(json.loads(backend.to_str()), pre, SPECIAL, [THINK])
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    return {**metadata, **ids, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    original = original_bpe(**FAMILIES[request.param])
    metadata = bpe_metadata(original, request.param, add_bos_token=False)
    return original, rebuilt(tmp_path_factory.mktemp("family"), metadata)


@pytest.mark.parametrize("text", [*CORPUS, MIXED])
def test_every_known_rule_gives_the_original_ids(family, text: str) -> None:
    original, ours = family
    ids = original.encode(text).ids
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_gives_the_original_ids_and_comes_back(family, text: str) -> None:
    original, ours = family
    ids = ours.encode(text)
    assert ids == original.encode(text).ids
    normal = original.normalizer.normalize_str(text) if original.normalizer else text
    assert b"".join(map(ours.id_to_token_bytes, ids)).decode() == normal


def test_special_and_user_defined_tokens(family) -> None:
    original, ours = family
    assert ours.special_ids == {0, 1}
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, frozenset({1}))
    think = original.token_to_id(THINK)
    assert ours.encode(f"a{THINK}b")[1] == think
    assert ours.decode([0, think, 1]) == THINK
    assert ours.vocab_size == original.get_vocab_size()


# -- who adds a BOS --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("qwen2", {}, [], []),
        ("llama-bpe", {}, [0], []),
        ("tekken", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("smollm", {"add_bos_token": True}, [0], []),
        ("smollm", {"add_eos_token": True}, [], [1]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ],
)
def test_bos_and_eos_follow_the_flags_and_then_the_family(tmp_path, pre, flags, before, after) -> None:
    original = original_bpe(**FAMILIES[pre])
    ours = rebuilt(tmp_path, bpe_metadata(original, pre, **flags))
    inner = original.encode("some text").ids
    assert ours.encode("some text") == before + inner + after
    assert ours.encode("some text", add_special_tokens=False) == inner
    assert ours.encode("") == before + after
    assert ours.encode_batch(["some text", ""]) == [before + inner + after, before + after]


def test_all_end_tokens_of_the_metadata(tmp_path: Path) -> None:
    ours = rebuilt(tmp_path, bpe_metadata(original_bpe(), "gpt-2", eot_token_id=5, eom_token_id=1))
    assert ours.eos_token_ids == {1, 5}


# -- SentencePiece ---------------------------------------------------------------------------------------------------


def original_sentencepiece(has_prefix: bool) -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: BPE over marked spaces with byte fallback."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark] if has_prefix else [mark])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    words = Path(__file__).parents[3].joinpath("LICENSE").read_text(encoding="utf-8").split(" ")
    # a piece begins with the mark of a space, as SentencePiece trains it
    backend.train_from_iterator([f" {word}" if not has_prefix else word for word in words], trainer)
    trained = json.loads(backend.to_str())
    # byte tokens are ordinary entries that only the fallback uses
    trained["added_tokens"] = trained["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(trained))
    backend.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def sentencepiece_metadata(backend: tokenizers.Tokenizer, **more: Any) -> dict[str, Any]:
    trained = json.loads(backend.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    rank = {left + right: -float(index) for index, (left, right) in enumerate(trained["merges"])}
    kinds = [gguf_files.UNKNOWN, *2 * [gguf_files.CONTROL], *256 * [gguf_files.BYTE]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": kinds + [gguf_files.NORMAL] * (len(tokens) - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory):
    original = original_sentencepiece(request.param)
    metadata = sentencepiece_metadata(original, add_space_prefix=request.param)
    return original, metadata, rebuilt(tmp_path_factory.mktemp("sentencepiece"), metadata)


@pytest.mark.parametrize("text", [*CORPUS, "<s>twice</s> the License", "license shall mean"])
def test_sentencepiece_gives_the_original_ids(sentencepiece, text: str) -> None:
    original, _, ours = sentencepiece
    ids = original.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == ids[1:]
    assert ours.decode(ids) == original.decode(ids)


def merge_by_score(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's own procedure, written out: the best pair of neighbours, the leftmost among equals, joins."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf_files.NORMAL}
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in normal
        ]
        if not pairs:
            break
        _, place = min(pairs)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    known = [[p] if p in normal else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [piece for group in known for piece in group]


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from("aceilnst heo.\nüß日🙂"), min_size=1, max_size=40))
def test_sentencepiece_merges_as_its_procedure_says(sentencepiece, text: str) -> None:
    _, metadata, ours = sentencepiece
    marked = text.replace(" ", "▁")
    marked = "▁" + marked if metadata["tokenizer.ggml.add_space_prefix"] else marked
    got = [ours.id_to_token(token_id) for token_id in ours.encode(text, add_special_tokens=False)]
    assert got == merge_by_score(marked, metadata)


def test_sentencepiece_pieces_as_bytes(sentencepiece) -> None:
    _, metadata, ours = sentencepiece
    ids = ours.encode("naïve 日 text\n", add_special_tokens=False)
    prefix = b" " if metadata["tokenizer.ggml.add_space_prefix"] else b""
    assert b"".join(map(ours.id_to_token_bytes, ids)) == prefix + "naïve 日 text\n".encode()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "martian"},
            r"rule 'martian' \(tokenizer.ggml.pre\), which is unknown; known rules:.*smollm",
        ),
        ({"tokenizer.ggml.pre": None}, r"does not say how its tokenizer cuts text \(tokenizer.ggml.pre\)"),
        (
            {"tokenizer.ggml.model": "t5"},
            r"tokenizer.ggml.model is 't5'; known kinds of tokenizer: gpt2, llama",
        ),
        ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is missing"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "token_type has .* entries for 3 tokens"),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None},
            "has 'a' twice, as ids 0 and 2",
        ),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges has 'ab', which is no pair"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges has 'a b c', which is no pair"),
        ({"tokenizer.ggml.merges": ["qqq zzz"]}, "tokens and merges do not fit together"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id should be of type int"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token should be of type bool"),
    ],
)
def test_what_is_unknown_or_damaged_is_refused_by_name(
    tmp_path, change: dict[str, Any], message: str
) -> None:
    metadata = {**bpe_metadata(original_bpe(), "gpt-2"), **change}
    with pytest.raises(ModelLoadError, match=message):
        rebuilt(tmp_path, {key: value for key, value in metadata.items() if value is not None})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(24, 60_000), st.integers(0, 255)), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_changed_bytes_never_crash(tmp_path_factory, kind: str, changes: list[tuple[int, int]]) -> None:
    whole = vocabulary_file(kind)
    content = bytearray(whole)
    for place, value in changes:
        content[place % len(whole)] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    try:
        ours = tokenizer_from_gguf(GGUFReader(path).metadata)
        ours.decode(ours.encode(MIXED))
        for token_id in (0, 5, ours.vocab_size):
            ours.id_to_token_bytes(token_id)
    except ModelLoadError:
        pass


@cache
def vocabulary_file(kind: str) -> bytes:
    if kind == "bpe":
        metadata = bpe_metadata(original_bpe(), "gpt-2")
    else:
        metadata = sentencepiece_metadata(original_sentencepiece(has_prefix=True))
    with tempfile.TemporaryDirectory() as folder:
        return gguf_files.write_gguf(Path(folder) / "vocabulary.gguf", metadata).read_bytes()


# -- the demo model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_pair(smollm2_gguf: Path, smollm2_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder), tokenizer_from_gguf(
        GGUFReader(smollm2_gguf).metadata
    )


@pytest.mark.parametrize(
    "text", [*CORPUS, "<|im_start|>user\nHi 42<|im_end|>\n", "<|endoftext|><repo_name>x"]
)
def test_the_demo_model_gives_the_ids_of_transformers(demo_pair, text: str) -> None:
    theirs, ours = demo_pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_the_demo_model_gives_the_ids_of_transformers_for_any_text(demo_pair, text: str) -> None:
    theirs, ours = demo_pair
    assert ours.encode(text) == theirs.encode(text)


def test_the_demo_model_has_the_same_special_tokens_and_template(demo_pair) -> None:
    theirs, ours = demo_pair
    assert ours.special_ids == set(theirs.all_special_ids) | {
        i for i, t in theirs.added_tokens_decoder.items() if t.special
    }
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.eos_token_ids == {2}
    assert ours.vocab_size == len(theirs) == 49152
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert ours.chat_template == theirs.chat_template
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(messages, tokenize=True) == expected


def test_opening_a_tokenizer_imports_neither_torch_nor_transformers(smollm2_gguf: Path) -> None:
    code = (
        "import sys; from inferplane.models.source import resolve_model;"
        "from inferplane.models.loader import load_tokenizer;"
        f"t = load_tokenizer(resolve_model({str(smollm2_gguf)!r}));"
        "t.apply_chat_template([dict(role='user', content='x')]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
