"""The drawings of the documentation. Each function draws one; `make docs` writes them to docs/pictures."""

import itertools
from collections.abc import Callable

from drawing import Box, Drawing


def whorl() -> Drawing:
    """From a model's configuration to the kernels that run it."""
    d = Drawing(
        900,
        440,
        "whorl: from a model's configuration to kernels",
        "A checkpoint and launch flags are read by the doctor and by one model file. Engine, trainer, graph "
        "passes and adapters run that model on operators with one contract, which have three backends: torch on a"
        " CPU, Triton on NVIDIA GPUs and torch_npu on Ascend NPUs.",
    )
    checkpoint = d.box(24, 30, 190, 62, "checkpoint and flags", "config.json, launch.sh", "data")
    doctor = d.box(24, 128, 190, 62, "whorl doctor", "which rotary path, what\nis mismatched, the fix", "accent")
    model = d.box(300, 30, 220, 62, "whorl.models", "one file for each architecture", "work")
    users = [
        d.box(x, 160, 186, 76, name, note, "work")
        for x, name, note in (
            (300, "whorl serve, chat", "engine: paged KV cache,\nbatches, speculation"),
            (496, "whorl train", "TorchTitan, sparse\nattention, swapped AdamW"),
            (692, "whorl.passes", "sequence parallelism on\nany torch.compile'd model"),
        )
    ]
    adapters = d.box(692, 30, 186, 62, "whorl.adapters", "Megatron, transformers", "work")
    ops = d.box(300, 286, 578, 50, "whorl.ops: one contract and one reference for each operator", "", "accent")
    ascend = d.box(24, 280, 190, 62, "whorl.ascend", "torch_npu's names and\nsignatures, on any device", "accent")
    backends = [
        d.box(x, 374, 186, 50, name, note, kind)
        for x, name, note, kind in (
            (300, "torch", "CPU: in every test run", "plain"),
            (496, "Triton", "measured on one H200", "plain"),
            (692, "torch_npu", "checked on schemas only", "limit"),
        )
    ]
    d.arrow(checkpoint.at("right"), model.at("left"))
    d.arrow(checkpoint.at("bottom"), doctor.at("top"))
    for user in users[:2]:
        d.arrow(model.at("bottom"), (410, 126), (user.at("top")[0], 126), user.at("top"))
    d.arrow((520, 61), (606, 61), (606, 126), (785, 126), users[2].at("top"))
    for user in users:
        x, y = user.at("bottom")
        d.arrow((x, y), (x, 286))
    d.line(adapters.at("right"), (889, 61), (889, 311))
    d.arrow((889, 311), ops.at("right"))
    d.arrow(ascend.at("right"), ops.at("left"))
    for backend in backends:
        x, y = backend.at("top")
        d.arrow((x, 336), (x, y))
    return d


def engine_step() -> Drawing:
    d = Drawing(
        900,
        330,
        "One step of the engine",
        "Requests wait in a queue. The scheduler picks tokens up to a budget and blocks of the cache. A batch "
        "becomes at most two forward calls, one for decoding and drafts, recorded as a graph, and one for "
        "prompts; a long prompt and decoding tokens share one call. The sampler accepts tokens, which go to clients "
        "and back to the scheduler.",
    )
    queue = d.box(24, 60, 120, 66, "requests", "wait in order", "data")
    scheduler = d.box(
        190, 50, 150, 86, "scheduler", "one token a decoding\nsequence, then chunks\nof prompts, to a budget", "work"
    )
    pool = d.box(190, 200, 150, 66, "block pool", "allocate, find a prefix,\npreempt", "data")
    proposer = d.box(386, 200, 150, 66, "proposer", "drafts: prompt lookup,\nsmaller model, MTP", "work")
    decode = d.box(386, 24, 150, 62, "call: decode", "recorded graph", "accent")
    prompt = d.box(386, 110, 150, 62, "call: prompts", "any size, or recorded", "accent")
    forward = d.box(584, 58, 130, 80, "model", "layers over\nwhorl.ops", "work")
    sampler = d.box(762, 58, 116, 80, "sampler", "sample, verify\ndrafts, logprobs", "work")
    finish = d.box(
        584, 200, 294, 66, "finish", "append tokens, detect stops,\npublish full blocks, free blocks", "work"
    )
    d.arrow(queue.at("right"), scheduler.at("left"))
    d.arrow(scheduler.at("right", 0.3), (363, 76), (363, 55), decode.at("left"))
    d.arrow(scheduler.at("right", 0.7), (363, 110), (363, 141), prompt.at("left"))
    d.arrow(scheduler.at("bottom"), pool.at("top"))
    d.arrow(proposer.at("left"), (363, 233), (363, 160), (386, 160))
    d.arrow(decode.at("right"), (560, 55), (560, 85), (584, 85))
    d.arrow(prompt.at("right"), (560, 141), (560, 112), (584, 112))
    d.arrow(forward.at("right"), sampler.at("left"))
    d.arrow(sampler.at("bottom"), (820, 200))
    d.arrow(finish.at("left"), proposer.at("right"))
    d.arrow((731, 266), (731, 300), (84, 300), queue.at("bottom"))
    d.label(400, 294, "running sequences come again in the next step; new text goes to the client")
    return d


def cache() -> Drawing:
    d = Drawing(
        900,
        330,
        "The paged KV cache",
        "Two sequences share the blocks of their common prefix through their block tables; each has separate"
        " blocks after it. A cached token's slot is its block times the block size plus its offset.",
    )
    d.label(24, 36, "block tables: the blocks of a sequence, in order", style="title", anchor="start")
    pool_x, pool_y, side = 340, 70, 84
    blocks = {
        number: d.box(
            pool_x + (number % 6) * (side + 6), pool_y + (number // 6) * 96, side, 80, f"block {number}", note, kind
        )
        for number, note, kind in (
            (0, "shared", "accent"),
            (1, "shared", "accent"),
            (2, "sequence A", "data"),
            (3, "free", "plain"),
            (4, "sequence B", "work"),
            (5, "free, kept", "limit"),
            (6, "sequence A", "data"),
            (7, "free", "plain"),
            (8, "sequence B", "work"),
            (9, "free", "plain"),
            (10, "free", "plain"),
            (11, "free, kept", "limit"),
        )
    }
    table_a = d.box(24, 84, 250, 44, "A:  0  1  2  6", "", "data")
    table_b = d.box(24, 184, 250, 44, "B:  0  1  4  8", "", "work")
    d.arrow(table_a.at("right"), (318, 106), blocks[0].at("left", 0.45))
    d.arrow(table_b.at("right"), (306, 206), (306, 130), blocks[0].at("left", 0.75))
    d.label(24, 150, "equal prompts share full blocks,", anchor="start")
    d.label(24, 166, "found by content and what came before", anchor="start")
    d.label(24, 282, "slot of a token = block * block_size + offset.", anchor="start", style="name")
    d.label(
        24, 304, "A freed block keeps its content until it is needed: the next turn of a chat finds it.", anchor="start"
    )
    return d


def one_arithmetic() -> Drawing:
    d = Drawing(
        900,
        350,
        "One arithmetic: four paths, one order, the same bits",
        "A token decoded alone, decoded in a batch, computed as part of a prompt or in a trainer goes through "
        "kernels of different shapes that add in one fixed order, so the result has the same bits.",
    )
    paths = [
        d.box(24, 40 + 76 * i, 176, 56, name, note, "data")
        for i, (name, note) in enumerate(
            (
                ("decoded alone", "1 token"),
                ("decoded in a batch", "2 to 256 tokens"),
                ("in a prompt", "any size of chunk"),
                ("in a trainer", "autograd, bf16"),
            )
        )
    ]
    matmul = d.box(
        260,
        40,
        380,
        84,
        "matmul",
        "K upwards in one chain of tensor-core steps,\nrounded once; the tile does not matter",
        "work",
    )
    attention = d.box(260, 140, 380, 130, "", "", "work")
    norm = d.box(260, 286, 380, 44, "norm, log-softmax: one written-out tree", "", "work")
    d.label(450, 164, "attention", style="name")
    d.label(450, 184, "keys cut at multiples of 128 of their position")
    for i in range(4):
        cut = d.box(284 + 84 * i, 194, 76, 30, f"{128 * i}..", "", "plain")
        if i:
            d.arrow((284 + 84 * i - 8, 209), cut.at("left"))
    d.label(450, 248, "each cut from zero, folded first to last")
    result = d.box(712, 130, 164, 100, "same bits", "torch.equal on logits\nand logprobs", "accent")
    for path in paths:
        y = path.at("right")[1]
        d.arrow((200, y), (254, y))
    for part in (matmul, attention, norm):
        d.line(part.at("right"), (676, part.at("right")[1]))
    d.line((676, matmul.at("right")[1]), (676, norm.at("right")[1]))
    d.arrow((676, 180), result.at("left"))
    d.label(794, 262, "bf16 and fp16 on Hopper,")
    d.label(794, 278, "and on a CPU; not promised")
    d.label(794, 294, "on Ascend")
    return d


def sparse_attention() -> Drawing:
    d = Drawing(
        900,
        330,
        "DeepSeek sparse attention",
        "The indexer scores a query against every key with small heads, an exact top-k keeps 2048 of them, and "
        "attention reads only those, sorted by position. In training a KL loss teaches the indexer the "
        "attention's own distribution.",
    )
    hidden = d.box(24, 120, 120, 60, "hidden state", "of a query", "data")
    indexer = d.box(200, 40, 170, 72, "indexer", "64 small heads score\nevery earlier key", "work")
    topk = d.box(420, 40, 170, 72, "exact top 2048", "ties to the earliest,\nsorted by position", "work")
    latent = d.box(200, 190, 170, 72, "latent cache", "512 + 64 channels,\nshared by all heads", "data")
    attention = d.box(
        640, 110, 236, 84, "attention, 128 heads", "over the selected keys only,\ncut in 128s of the list", "accent"
    )
    output = d.box(640, 236, 236, 52, "output", "", "data")
    loss = d.box(420, 190, 170, 72, "indexer loss", "KL to the attention's\nown weights (training)", "limit")
    d.arrow(hidden.at("right", 0.3), (172, 138), (172, 76), indexer.at("left"))
    d.arrow(hidden.at("right", 0.7), (172, 162), (172, 226), latent.at("left"))
    d.arrow(indexer.at("right"), topk.at("left"))
    d.arrow(topk.at("right"), (758, 76), attention.at("top"))
    d.arrow(latent.at("right"), (395, 226), (395, 152), attention.at("left"))
    d.arrow(attention.at("bottom"), output.at("top"))
    d.arrow((640, 180), (505, 180), loss.at("top"), dashed=True)
    d.arrow(loss.at("bottom"), (505, 304), (160, 304), (160, 90), (200, 90), dashed=True)
    d.label(332, 298, "gradient of the loss reaches the indexer alone")
    return d


def passes() -> Drawing:
    d = Drawing(
        900,
        400,
        "Sequence parallelism by graph passes",
        "Before: an all-reduce, then every rank adds, norms and quantizes all tokens. After: a reduce-scatter, "
        "each rank works on its share of the tokens, and an all-gather of fewer bytes where all tokens are "
        "needed.",
    )
    d.label(165, 34, "before, on each rank", style="title")
    d.label(465, 34, "after, on each rank", style="title")
    d.label(765, 34, "how", style="title")
    before = [
        ("all-reduce", "2 S bytes", "limit"),
        ("add residual", "all T tokens", "plain"),
        ("norm", "all T tokens", "plain"),
    ]
    after = [
        ("reduce-scatter", "S bytes", "work"),
        ("add residual", "T / p tokens", "plain"),
        ("norm", "T / p tokens", "plain"),
        ("all-gather", "S / 2 or less, in int8", "work"),
    ]
    columns = ((60, [*before, ("sharded matmul", "", "data")]), (360, [*after, ("sharded matmul", "", "data")]))
    for x, entries in columns:
        step = 336 / len(entries)
        previous: Box | None = None
        for i, (name, note, kind) in enumerate(entries):
            box = d.box(x, 52 + i * step, 210, step - 22, name, note, kind)
            if previous is not None:
                d.arrow(previous.at("bottom"), box.at("top"))
            previous = box
    for i, (name, note) in enumerate(
        (
            ("1  layout analysis", "replicated, partial, sharded"),
            ("2  place the gathers", "where the fewest bytes move"),
            ("3  quantize them", "a scale for each token"),
            ("4  prove it", "equal outputs, unchanged parts"),
            ("5  report", "what was rewritten, and why not"),
        )
    ):
        d.box(650, 52 + i * 67, 230, 54, name, note, "accent")
    return d


def training_step() -> Drawing:
    d = Drawing(
        900,
        300,
        "A training step with the optimizer's moments in host memory",
        "Forward and backward fill gradients on the device. The update goes through the parameters bucket by "
        "bucket: while one bucket is updated, the moments of the next are copied in and those of the previous "
        "copied out.",
    )
    d.label(24, 32, "device", style="title", anchor="start")
    d.label(24, 206, "host", style="title", anchor="start")
    forward = d.box(24, 50, 160, 62, "forward", "sparse attention,\nindexer loss", "work")
    backward = d.box(214, 50, 160, 62, "backward", "fused gradients", "work")
    clip = d.box(404, 50, 110, 62, "clip", "norm over ranks", "work")
    d.arrow(forward.at("right"), backward.at("left"))
    d.arrow(backward.at("right"), clip.at("left"))
    host: Box | None = None
    for i, kind in enumerate(("plain", "accent", "plain")):
        name = ("bucket i-1", "bucket i", "bucket i+1")[i]
        note = ("copied out", "AdamW update", "copied in")[i]
        box = d.box(544 + i * 114, 50, 104, 62, name, note, kind)
        host = d.box(544 + i * 114, 222, 104, 52, "moments", "pinned memory", "data")
        x = box.at("bottom")[0]
        if i == 0:
            d.arrow((x, 112), (x, 222), text="")
        if i == 2:
            d.arrow((x, 222), (x, 112))
    assert host is not None
    d.arrow(clip.at("right"), (544, 81))
    d.label(710, 140, "at the same time:")
    d.label(710, 156, "copy out, update, copy in")
    d.label(24, 240, "Weights and gradients stay on the device; a step's result", anchor="start")
    d.label(24, 256, "is, bit for bit, that of AdamW with its moments on the device.", anchor="start")
    return d


def picture() -> Drawing:
    d = Drawing(
        900,
        330,
        "The way of a picture",
        "A picture is decoded in a child process, resized and cut into patches. The vision tower encodes each "
        "distinct picture once, a few layers a step, and keeps the features by digest. Text tokens take them at "
        "placeholders.",
    )
    source = d.box(24, 50, 140, 70, "picture", "data: URI, file, or a\nnamed http host", "data")
    decode = d.box(204, 50, 150, 70, "decoder", "child process, limits on\nbytes, pixels, seconds", "limit")
    patches = d.box(394, 50, 150, 70, "patches", "resized, normalized,\ndigest of the content", "work")
    tower = d.box(584, 50, 150, 70, "vision tower", "layers a step, within\nthe token budget", "accent")
    features = d.box(774, 50, 110, 70, "features", "kept by digest", "data")
    text = d.box(24, 210, 140, 70, "prompt", "text and placeholders", "data")
    embed = d.box(204, 210, 150, 70, "embeddings", "features 0 at the\nplaceholders", "work")
    layers = d.box(394, 210, 150, 70, "layers 0 to 2", "deepstack: features\n1 to 3 are added", "work")
    rest = d.box(584, 210, 150, 70, "other layers", "Qwen3 as it is,\n3-axis rotation", "work")
    answer = d.box(774, 210, 110, 70, "answer", "", "data")
    for row in ((source, decode, patches, tower, features), (text, embed, layers, rest, answer)):
        for a, b in itertools.pairwise(row):
            d.arrow(a.at("right"), b.at("left"))
    d.line(features.at("bottom"), (829, 165), (279, 165))
    d.arrow((279, 165), embed.at("top"))
    d.arrow((469, 165), layers.at("top"))
    return d


PICTURES: dict[str, Callable[[], Drawing]] = {
    "whorl": whorl,
    "engine_step": engine_step,
    "cache": cache,
    "one_arithmetic": one_arithmetic,
    "sparse_attention": sparse_attention,
    "passes": passes,
    "training_step": training_step,
    "picture": picture,
}
