"""Charts of measured figures, drawn from the same documents as the tables."""

from drawing import Drawing, Kind
from figures import decode_rows, operator_rows, training_row, transformers_tok_s

_ROW, _BAR = 24, 15


def speed() -> Drawing:
    """Three charts, each with its peers: decoding, operators and training, on one H200."""
    rows = decode_rows()
    operators = [row for row in operator_rows() if row[2] is not None]
    height = 92 + _ROW * (len(rows) + 1) + 78
    d = Drawing(
        900,
        height,
        "Speed on one H200, bf16",
        "Decoding Qwen3-30B-A3B as a share of what memory bandwidth allows, operators as a multiple of a plain "
        "copy's time, and training steps of DeepSeek-V3.2 in tokens a second, each next to its peers.",
    )
    _decode(d, rows)
    _operators(d, operators)
    _training(d)
    d.label(
        24,
        height - 18,
        "Drawn from bench/results; the pages there have commands, versions and what was missed.",
        anchor="start",
    )
    return d


def _decode(d: Drawing, rows: dict[tuple[int, int], dict[str, float]]) -> None:
    left, full = 118, 140
    d.label(24, 34, "decode, Qwen3-30B-A3B", style="title", anchor="start")
    d.label(24, 54, "sequences x keys; share of the limit by bytes", anchor="start")
    peer = transformers_tok_s(1, 16)
    assert peer, "transformers is in the run of the first row"
    entries = [("transformers", peer / rows[1, 16]["limit_tok_s"], "plain", peer)]
    entries += [
        (f"{batch} x {context}", row["tok_s"] / row["limit_tok_s"], "work", row["tok_s"])
        for (batch, context), row in rows.items()
    ]
    for i, (label, share, kind, tok_s) in enumerate(entries):
        y = 70 + _ROW * i
        d.label(left - 8, y + 12, label, anchor="end")
        d.bar(left, y, full * share, _BAR, kind)
        d.label(left + full + 8, y + 12, f"{tok_s:.0f} tok/s", anchor="start")
    d.line((left + full, 64), (left + full, 70 + _ROW * len(entries)), dashed=True)
    d.label(left + full, 84 + _ROW * len(entries), "limit")


def _operators(d: Drawing, operators: list[tuple[str, float, float | None, float | None, float]]) -> None:
    left, unit = 352, 82  # unit: the length of a copy's bar
    d.label(left, 34, "operators", style="title", anchor="start")
    d.label(left, 54, "time as a multiple of a plain copy", anchor="start")
    y = 72.0
    for label, ours, compiled, liger, copy in operators[:5]:
        name = label.replace("`", "").replace(", 16384 tokens", "")
        d.label(left, y + 6, name, anchor="start")
        for time, kind in ((ours, "work"), (compiled, "plain"), (liger, "data")):
            if time is None:
                continue
            y += 12
            d.bar(left, y, unit * time / copy, 9, kind)
            d.label(left + unit * time / copy + 5, y + 8.5, f"{time / copy:.2f}", anchor="start")
        y += 19
    _legend(d, left, y + 2, (("whorl", "work"), ("torch.compile", "plain"), ("Liger", "data")))


def _legend(d: Drawing, x: float, y: float, entries: tuple[tuple[str, Kind], ...]) -> None:
    for name, kind in entries:
        d.bar(x, y, 10, 10, kind)
        d.label(x + 15, y + 9, name, anchor="start")
        x += 28 + 7 * len(name)


def _training(d: Drawing) -> None:
    left, bars, full = 640, 724, 120
    d.label(left, 34, "training, DeepSeek-V3.2", style="title", anchor="start")
    d.label(left, 54, "tokens a second, steps of 4096", anchor="start")
    most = training_row(["train_4k"], "kernels", 4, 4096)["tok_s"]
    y = 70
    for layers in (4, 8):
        d.label(left, y + 12, f"{layers} layers", anchor="start", style="name")
        y += _ROW
        for name, row_name, kind in (("transformers", "transformers", "plain"), ("whorl", "kernels", "work")):
            row = training_row(["train_4k"], row_name, layers, 4096)
            d.label(bars - 8, y + 12, name, anchor="end")
            d.bar(bars, y, full * row["tok_s"] / most, _BAR, kind)
            d.label(bars + full * row["tok_s"] / most + 6, y + 12, f"{row['tok_s'] / 1000:.1f}k", anchor="start")
            y += _ROW
        y += 10
    d.label(left, y + 14, "whorl trains the indexer,", anchor="start")
    d.label(left, y + 30, "transformers does not", anchor="start")
