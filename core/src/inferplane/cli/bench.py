"""``inferplane bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inferplane.cli.options import GroupedCommand, GroupedOption, engine_options
from inferplane.config.args import EngineArgs


class BenchGroup(click.Group):
    """``bench serve`` lives with the server and is looked up there only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._contributed()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if command := super().get_command(ctx, cmd_name):
            return command
        if target := self._contributed().get(cmd_name):
            from importlib import import_module

            module, attribute = target.split(":")
            return getattr(import_module(module), attribute)
        return None

    def _contributed(self) -> dict[str, str]:
        from inferplane.plugins import load_plugins

        return {
            s.name.removeprefix("bench "): s.target
            for s in load_plugins().commands()
            if s.name.startswith("bench ")
        }


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure throughput, latency, serving and start-up."""


def _case(name: str, default: object, help: str):
    return click.option(
        name, cls=GroupedOption, group="Benchmark", default=default, show_default=True, help=help
    )


def _common(command):
    command = click.option(
        "--json",
        "as_json",
        cls=GroupedOption,
        group="Benchmark",
        is_flag=True,
        help="One JSON object a case.",
    )(command)
    command = _case("--repeat", 1, "Runs of the case; the median is printed.")(command)
    command = _case("--prompt-seed", 0, "Seed of the random prompts.")(command)
    vs = click.option(
        "--vs",
        cls=GroupedOption,
        group="Benchmark",
        type=click.Choice(["transformers"]),
        help="Run this peer too, in turn, and print the ratio.",
    )
    command = vs(command)
    return click.option(
        "--vs-dtype",
        cls=GroupedOption,
        group="Benchmark",
        default="bfloat16",
        show_default=True,
        help="The peer's dtype.",
    )(command)


@bench.command(cls=GroupedCommand)
@_case("--num-requests", 64, "Requests, all given at once.")
@_case("--input-len", 128, "Prompt tokens of each.")
@_case("--output-len", 64, "Output tokens of each.")
@_common
@engine_options
def throughput(
    engine_args: EngineArgs, num_requests: int, input_len: int, output_len: int, **common: Any
) -> None:
    """Tokens per second with all requests at hand, offline."""
    case = f"throughput_{num_requests}x{input_len}+{output_len}"
    _run(engine_args, case, num_requests, input_len, output_len, **common)


@bench.command(cls=GroupedCommand)
@_case("--batch-size", 1, "Requests that decode together.")
@_case("--input-len", 128, "Prompt tokens of each.")
@_case("--output-len", 128, "Output tokens of each.")
@_common
@engine_options
def latency(engine_args: EngineArgs, batch_size: int, input_len: int, output_len: int, **common: Any) -> None:
    """Time of one batch from the first prompt token to the last output token."""
    case = f"decode_bs{batch_size}_{input_len}+{output_len}"
    if output_len == 1:
        case = f"prefill_{batch_size}x{input_len}+1"
    _run(engine_args, case, batch_size, input_len, output_len, **common)


@bench.command(cls=GroupedCommand)
@click.option(
    "--case",
    "names",
    cls=GroupedOption,
    group="Benchmark",
    multiple=True,
    metavar="CASE",
    help="throughput_NxIN+OUT, decode_bsN_IN+OUT, prefill_NxIN+1 or startup; may be given several times. "
    "Default: startup and one of each.",
)
@_case("--repeat", 3, "Runs of each case; the median is printed.")
@_case("--prompt-seed", 0, "Seed of the random prompts.")
@click.option(
    "--profile",
    cls=GroupedOption,
    group="Benchmark",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Also run each case under the device's profiler, and write a report for each.",
)
@click.option(
    "--json",
    "as_json",
    cls=GroupedOption,
    group="Benchmark",
    is_flag=True,
    help="One JSON object a case.",
)
@engine_options
def cases(
    engine_args: EngineArgs,
    names: tuple[str, ...],
    repeat: int,
    prompt_seed: int,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Several cases in one start of the engine: random token ids, greedy, past any end of sequence, no prefix cache."""
    from inferplane.bench.cases import DEFAULT_CASES, parse_case, run_cases
    from inferplane.bench.report import emit

    try:
        chosen = [parse_case(name) for name in names or DEFAULT_CASES]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--case") from None
    for measurement in run_cases(engine_args, chosen, repeat=repeat, seed=prompt_seed, profile=profile):
        emit(measurement, as_json)


@bench.command(context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case.")
@click.option("--repeat", default=1, show_default=True, help="Starts; the median is printed.")
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def startup(serve_arguments: tuple[str, ...], as_json: bool, repeat: int) -> None:
    """Time from process start to a healthy /health of `inferplane serve SERVE_ARGUMENTS`."""
    from inferplane.bench.offline import median_of
    from inferplane.bench.report import emit
    from inferplane.bench.startup import measure_startup

    emit(median_of([measure_startup(list(serve_arguments)) for _ in range(repeat)]), as_json)


def _run(
    engine_args: EngineArgs,
    case: str,
    num: int,
    input_len: int,
    output_len: int,
    *,
    as_json: bool,
    repeat: int,
    prompt_seed: int,
    vs: str | None,
    vs_dtype: str,
) -> None:
    from inferplane.bench.offline import TransformersPeer, build_llm, median_of, random_prompts, run_ours
    from inferplane.bench.report import emit

    with build_llm(engine_args, input_len + output_len) as llm:
        peer = TransformersPeer(llm, vs_dtype) if vs else None
        vocab_size = llm.config.model.vocab_size
        warm = random_prompts(min(num, 4), min(input_len, 32), vocab_size, prompt_seed + 1_000_000)
        run_ours(llm, case, warm, 2)
        if peer:
            peer.run(case, warm, 2)
        ours, theirs = [], []
        for i in range(repeat):  # in turn, so that a slow spell of the machine meets both
            prompts = random_prompts(num, input_len, vocab_size, prompt_seed + i)
            ours.append(run_ours(llm, case, prompts, output_len))
            if peer:
                theirs.append(peer.run(case, prompts, output_len))
    best = median_of(ours)
    if theirs:
        other = median_of(theirs)
        best.extra["ratio_to_" + other.engine] = round(other.seconds / best.seconds, 2)
        emit(other, as_json)
    emit(best, as_json)
