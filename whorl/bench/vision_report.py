"""The result of `whorl bench vision` as text."""

from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import table


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


def _tower(model: Document, header: Document) -> list[str]:
    tower, peer = _ran(model, "tower"), _ran(model, "peer")
    if tower is None:
        return []
    names = {
        "pictures": f"{header['pictures']} of {header['side']}x{header['side']}",
        "video": f"{header['frames']} frames of {header['frame'][0]}x{header['frame'][1]}",
    }
    cells = [["tower", "", "ms", "patches/s", "TFLOP/s", "of matmul"]]
    for part, name in names.items():
        for row in (tower[part], *([] if peer is None else [peer[part]])):
            speed = [f"{row['seconds'] * 1e3:.1f}", f"{row['patches_s']:.0f}", f"{row['tflop_s']:.3g}"]
            cells.append([name, row["label"], *speed, f"{row['share_of_matmul']:.1%}"])
    lines = [*table(cells), f"heads     FLOPs count {tower['head_dim']} channels; {tower['padding']}"]
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
    cells = [["first token", "prompt", "ms", "as much text, ms"]]
    for row in engine["first_token"]:
        times = [f"{row['seconds'] * 1e3:.1f}", f"{row['text_seconds'] * 1e3:.1f}"]
        cells.append([f"{row['pictures']} images", f"{row['prompt_tokens']} tokens", *times])
    lines = ["", *table(cells), ""]
    cells = [["decode", "keys", "after an image, ms", "after text", "text model", "image / text model"]]
    alone = [None] * len(engine["decode"]) if text is None else text["decode"]
    for row, other in zip(engine["decode"], alone, strict=True):
        times = [f"{row['ms_per_step']:.3f}", f"{row['text_ms_per_step']:.3f}"]
        last = ["", ""] if other is None else [f"{other['ms_per_step']:.3f}", f"{other['ratio']:.3f}"]
        cells.append([f"batch {row['batch']}", str(row["keys"]), *times, *last])
    return [*lines, *table(cells)]
