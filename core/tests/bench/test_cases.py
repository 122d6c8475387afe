"""Cases by name, run on a folder with nothing but a configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from inferplane.bench.cases import DEFAULT_CASES, Case, parse_case
from inferplane.cli.bench import bench
from inferplane.reference.platform import HostRuntime


def test_names_of_cases():
    assert parse_case("throughput_256x512+256") == Case("throughput_256x512+256", 256, 512, 256)
    assert parse_case("decode_bs32_128+256") == Case("decode_bs32_128+256", 32, 128, 256)
    assert parse_case("prefill_16x4096+1") == Case("prefill_16x4096+1", 16, 4096, 1)
    assert parse_case("startup").n == 0
    assert all(map(parse_case, DEFAULT_CASES))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "throughput",
        "throughput_0x1+1",
        "prefill_1x2+2",
        "decode_1x2+3",
        "decode_bs1_2+0",
        "startup2",
        "a+b",
    ],
)
def test_what_is_no_case_says_which_there_are(name: str):
    with pytest.raises(
        ValueError, match=r"write throughput_NxIN\+OUT, decode_bsN_IN\+OUT, prefill_NxIN\+1 or startup"
    ):
        parse_case(name)


@pytest.fixture
def config_only(tiny_model: Callable[[str], Path], tmp_path: Path) -> str:
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    return str(tmp_path)


OPTIONS = "--load-format dummy --device reference --kv-cache-bytes 4MiB --max-num-seqs 4 --json --repeat 2"


def run(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(bench, ["cases", *arguments, *OPTIONS.split()], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_several_cases_in_one_start(config_only: str):
    names = ["startup", "throughput_3x8+4", "decode_bs1_5+6", "prefill_2x20+1"]
    lines = run(config_only, *(f"--case={name}" for name in names))
    assert [line["case"] for line in lines] == names
    start, throughput, *_ = lines
    assert start["weights_s"] >= 0 and start["seconds"] > 0
    assert (throughput["n"], throughput["inp"], throughput["out"]) == (3, 8, 4)
    assert throughput["out_tok_s"] == pytest.approx(3 * 4 / throughput["seconds"], rel=0.01)
    assert throughput["total_tok_s"] == pytest.approx(3 * 12 / throughput["seconds"], rel=0.01)
    assert throughput["repeats"] == 2
    assert {"engine", "model", "device", "dtype", "commit"} <= throughput.keys()


def test_profiles_are_written_beside_the_figures(
    config_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def profile(self: HostRuntime, run: Callable[[], object]) -> str:
        run()
        return "busy 99 %"

    monkeypatch.setattr(HostRuntime, "profile", profile)
    run(config_only, "--case=decode_bs1_5+6", f"--profile={tmp_path / 'profiles'}")
    assert (tmp_path / "profiles" / "decode_bs1_5+6.txt").read_text() == "decode_bs1_5+6\nbusy 99 %\n"


def test_a_wrong_case_is_refused_before_anything_starts():
    result = CliRunner().invoke(bench, ["cases", "--case", "decode_4"])
    assert result.exit_code == 2
    assert "'decode_4' is no case" in result.output
