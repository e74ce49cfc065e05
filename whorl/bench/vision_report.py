"""The result of `whorl bench vision` as text."""

from collections.abc import Callable

from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import Column, columns


def render(document: Document) -> str:
    """Return the document as text."""
    header = document["header"]
    lines = [
        *render_provenance(header),
        f"weights   random, {header['dtype']}; a large matmul here runs at {header['matmul_tflop_s']:.3g} TFLOP/s",
    ]
    for model in document["models"]:
        lines += ["", f"model     {model['model']}", *_notes(model), *_tower(model, header)]
        lines += [*_preprocessing(model), *_engine(model)]
    return "\n".join(lines)


def _notes(model: Document) -> list[str]:
    return [f"{name}: {part['note']}" for name, part in model.items() if isinstance(part, dict) and "note" in part]


def _ran(model: Document, name: str) -> Document | None:
    part: Document | None = model.get(name)
    return None if part is None or "note" in part else part


def _ms(name: str) -> Callable[[Document], str]:
    return lambda row: f"{row[name] * 1e3:.1f}"


_TOWER: tuple[Column, ...] = (
    ("tower", "{name}"),
    ("", "{label}"),
    ("ms", _ms("seconds")),
    ("patches/s", "{patches_s:.0f}"),
    ("TFLOP/s", "{tflop_s:.3g}"),
    ("of matmul", "{share_of_matmul:.1%}"),
)
_FIRST: tuple[Column, ...] = (
    ("first token", "{pictures} images"),
    ("prompt", "{prompt_tokens} tokens"),
    ("ms", _ms("seconds")),
    ("as much text, ms", _ms("text_seconds")),
)
_DECODE: tuple[Column, ...] = (
    ("decode", "batch {batch}"),
    ("keys", "{keys}"),
    ("after an image, ms", "{ms_per_step:.3f}"),
    ("after text", "{text_ms_per_step:.3f}"),
    ("text model", "{alone[ms_per_step]:.3f}"),
    ("image / text model", "{alone[ratio]:.3f}"),
)


def _tower(model: Document, header: Document) -> list[str]:
    tower, peer = _ran(model, "tower"), _ran(model, "peer")
    if tower is None:
        return []
    names = {
        "pictures": f"{header['pictures']} of {header['side']}x{header['side']}",
        "video": f"{header['frames']} frames of {header['frame'][0]}x{header['frame'][1]}",
    }
    sources = [tower, *([] if peer is None else [peer])]
    rows = [{"name": name, **source[part]} for part, name in names.items() for source in sources]
    lines = [*columns(rows, _TOWER), f"heads     FLOPs count {tower['head_dim']} channels; {tower['padding']}"]
    if peer is not None:
        verdict = "right" if peer["is_right"] else "WRONG"
        errors = f"ours {peer['our_error']:.2e}, transformers' {peer['their_error']:.2e}"
        lines.append(f"outputs   {verdict}: error against fp64 {errors}")
    return lines


def _preprocessing(model: Document) -> list[str]:
    part = _ran(model, "preprocessing")
    if part is None:
        return []
    alone, tower, both = (part[name] * 1e3 for name in ("preprocessing_s", "tower_s", "both_s"))
    return [
        f"files     {part['pictures']} of {part['side']}x{part['side']}: preprocessing {alone:.1f} ms in "
        f"{part['processes']} processes, tower {tower:.1f} ms, overlapped {both:.1f} ms"
    ]


def _engine(model: Document) -> list[str]:
    engine, text = _ran(model, "engine"), _ran(model, "text_model")
    if engine is None:
        return []
    lines = ["", *columns(engine["first_token"], _FIRST), ""]
    alone = [None] * len(engine["decode"]) if text is None else text["decode"]
    rows = [row | {"alone": other} for row, other in zip(engine["decode"], alone, strict=True)]
    return [*lines, *columns(rows, _DECODE)]
