"""`python -m bench.train_curve`: trains a small DeepSeek-V3.2 on real text and records losses and gradient norm."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from whorl.bench.options import Device, prepare_torchtitan
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, need_plot, write_document
from whorl.fields import option
from whorl.files import check_output_file
from whorl.options import Json, exit_on_bad_usage, expand_options

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveOptions:
    """What is trained, and what becomes of the document."""

    row: str = option("kernels", "Switches of the model: a row of `whorl bench train`, or switches joined by +.")
    steps: int = option(200, "Steps in which the indexers learn.", least=1)
    tiny: bool | None = option(None, "Use a tiny model. Default: --tiny without an accelerator.", "--tiny/--full")
    read: Path | None = option(None, "Train nothing; show the document of an earlier run.", metavar="FILE")
    plot: Path | None = option(None, "Write a chart.", metavar="FILE")
    out: Path | None = option(None, "Write the document as JSON.", metavar="FILE")
    device: Device | None = option(None, "Default: the best device of this machine.")


@app.command()
@expand_options
def main(*, options: CurveOptions, as_json: Json = False) -> None:
    """Train a small DeepSeek-V3.2 on text, and record loss, gradient norm and indexer KL."""
    with exit_on_bad_usage():
        need_plot(options.plot)
        if options.out is not None:
            check_output_file(options.out)
        earlier = None if options.read is None else _read(options.read)
        prepare_torchtitan(options.device)
        from bench import train_curve_steps as curve

        settings = curve.CurveSettings.resolve(
            device=options.device, tiny=options.tiny, row=options.row, steps=options.steps
        )

    def run() -> Document:
        document = earlier or curve.run(settings)
        if options.out is not None:
            write_document(document, options.out)
        return document

    benchmark = Benchmark(run=run, render=curve.render, is_good=curve.is_good, draw=curve.write_plot)
    finish(benchmark, as_json, options.plot)


def _read(path: Path) -> Document:
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--read {path}: cannot be read: {error}") from error
    return document


if __name__ == "__main__":
    app()
