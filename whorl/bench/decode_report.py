"""The results of `whorl bench decode` and of `--profile` as text."""

from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import Column, columns

EXPERTS = "different ones of a layer that a step reads, counted / if tokens chose independently"

HOW = {
    "graph": "kernels of a replayed step",
    "eager": "kernels of an eager step",
    "host": "time on the host; launches are calls of torch's operators",
}


def size(num_bytes: float) -> str:
    """Return bytes as text, in GB or MB."""
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3f} MB"


def rate(tb_s: float) -> str:
    """Return a bandwidth as text, in TB/s or GB/s."""
    return f"{tb_s:.3f} TB/s" if tb_s >= 0.1 else f"{tb_s * 1e3:.2f} GB/s"


def render_header(header: Document) -> list[str]:
    """Return the header of a document as lines of text."""
    count, copy = header["num_parameters"], rate(header["copy_tb_s"])
    parameters = f"{count / 1e9:.3f} B" if count >= 1e8 else f"{count / 1e6:.3f} M"
    weights = f"{parameters} {header['weights']} weights, {header['dtype']}, {size(header['weight_bytes'])}"
    return [
        *render_provenance(header),
        f"model     {header['model']}: {weights}",
        f"reads     {size(header['bytes_per_token'])} a token at batch 1, without KV cache; a copy here moves {copy}",
    ]


def _experts(row: Document) -> str:
    """Return the experts that a step reads and those of independent choices; "-" where there are none to count."""
    if row.get("distinct_experts") is None:
        return "-"
    return f"{row['distinct_experts']:.1f} / {row['independent_experts']:.1f}"


_DECODE: tuple[Column, ...] = (
    ("decode", "{label}"),
    ("keys", "{context}"),
    ("batch", "{batch}"),
    ("experts", _experts),
    ("tok/s", "{tok_s:.1f}"),
    ("ms/step", "{ms_per_step:.3f}"),
    ("a step reads", lambda row: size(row["bytes_per_step"])),
    ("achieved", lambda row: rate(row["tb_s"])),
    ("of roofline", "{share_of_roofline:.1%}"),
)


def render(document: Document) -> str:
    """Return the document as text."""
    lines = render_header(document["header"])
    rows = [{"label": "whorl"} | row for row in document["decode"]] + document["peers"]
    if any(row["distinct_experts"] is not None for row in document["decode"]):
        lines.append(f"experts   {EXPERTS}")
    lines += ["", *columns(sorted(rows, key=lambda row: (row["context"], row["batch"])), _DECODE, named=3)]
    if (prefill := document["prefill"]) is not None:
        share = f"{prefill['share_of_matmul']:.0%} of a large matmul's {prefill['matmul_tflop_s']:.2f}"
        lines += ["", f"prefill   {prefill['prompt_tokens']} tokens in {prefill['seconds'] * 1e3:.1f} ms: "]
        lines[-1] += f"{prefill['tok_s']:.0f} tok/s, {prefill['tflop_s']:.2f} TFLOP/s, {share}"
    if (peer := document["peer_prefill"]) is not None:
        lines.append(f"          {peer['label']}: {_peer_prefill(peer)}")
    return "\n".join(lines)


def _peer_prefill(row: Document) -> str:
    if "note" in row:
        return str(row["note"])
    times = f"{row['seconds'] * 1e3:.1f} ms, {row['tok_s']:.0f} tok/s"
    return f"{times}, {row['chunk']} tokens at once, {row['attention']} attention: whorl is {row['ratio']:.2f}x as fast"


# ---- profiles

_PROFILE: tuple[Column, ...] = (
    ("part", "{part}"),
    ("us", "{us:.1f}"),
    ("us a layer", "{us_per_layer:.2f}"),
    ("share", "{share:.1%}"),
    ("launches", "{launches:.1f}"),
    ("must move", lambda row: size(row["bytes"]) if row["bytes"] else "-"),
    ("of roofline", "{share_of_roofline:.1%}"),
)


def render_profile(document: Document) -> str:
    """Return the document of a profile as text."""
    lines = render_header(document["header"])
    for result in document["profiles"]:
        total = result["step_us"]
        about = f"batch {result['batch']}, {result['context']} keys: {total:.1f} us a step; {HOW[result['how']]}"
        experts = [] if result["distinct_experts"] is None else [f"experts   {_experts(result)}: {EXPERTS}"]
        parts = columns(({**row, "share": row["us"] / total} for row in result["parts"]), _PROFILE)
        lines += ["", about, *experts, *parts]
    return "\n".join(lines)
