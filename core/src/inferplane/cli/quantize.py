"""``inferplane quantize``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

SCHEMES = ("fp8", "int8", "int4", "mxfp4")


@click.command()
@click.argument("model")
@click.option("--scheme", type=click.Choice(SCHEMES), required=True, help="What each number becomes.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option("--group-size", type=int, help="Columns that share a scale, of --scheme int4. Default: 128.")
@click.option(
    "--error-feedback",
    is_flag=True,
    help="Let later columns make up for what earlier ones lose (GPTQ), as inputs on a text say; of int4 and mxfp4.",
)
@click.option(
    "--kv-scales",
    is_flag=True,
    help="Write scales for --kv-cache-dtype fp8_e4m3, too, from the largest keys and values on a text.",
)
@click.option(
    "--calibration-text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the text for --error-feedback and --kv-scales. Default: a short one that comes along.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a sentence.")
def quantize(
    model: str,
    scheme: str,
    out: Path,
    group_size: int | None,
    error_feedback: bool,
    kv_scales: bool,
    calibration_text: Path | None,
    as_json: bool,
) -> None:
    """Round the weights of MODEL and write them as a compressed-tensors checkpoint."""
    if calibration_text is not None and not (error_feedback or kv_scales):
        raise click.UsageError(
            "--calibration-text is for --error-feedback and --kv-scales; neither is asked for"
        )
    from inferplane.config.args import EngineArgs
    from inferplane.config.resolve import resolve
    from inferplane.plugins import load_plugins
    from inferplane.quantization.calibration import default_text
    from inferplane.quantization.writer import scheme_named, write_quantized

    plugins = load_plugins()
    found = scheme_named(scheme, group_size)
    config = resolve(EngineArgs(model=model, device="reference"), plugins)
    text = None
    if error_feedback or kv_scales:
        text = default_text() if calibration_text is None else calibration_text.read_text(encoding="utf-8")
    written = write_quantized(
        config, plugins, found, out,
        calibration_text=text if error_feedback else None,
        kv_text=text if kv_scales else None,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps({"out": str(out), "scheme": str(found), **asdict(written)}))
        return
    before, after = written.bytes_before / 2**20, written.bytes_after / 2**20
    click.echo(
        f"{out}: {written.num_matrices} matrices as {found}, {written.num_plain} tensors as they were; "
        f"{before:.0f} MiB became {after:.0f} MiB"
    )
