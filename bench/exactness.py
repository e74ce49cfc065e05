"""Exact training beside sampling on a GPU: 0 other bits over 20 steps, what torch's products give, and what it costs.

    python -m bench.exactness                # everything, in about three minutes; tables at the end
    python -m bench.exactness steps qwen3    # one part, as JSON
    python -m bench.exactness --device cpu   # tiny models, to try the script

Parts that compare bits run side by side, each in a process of its own, then the timed ones alone. `bits` runs with
torch's workspaces and with starved ones, which should keep a library from splitting K.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from bench.reported_failures import FAILURES
from whorl import LLM, SamplingParams, exact, nn, ops
from whorl.bench.decode_engine import median_time, start, time_steps
from whorl.bench.provenance import provenance
from whorl.engine.weights import build, random_model
from whorl.timing import measure

BUDGET = 170  # seconds, of everything
# torch's workspaces, in KiB: none for cuBLAS, and the least that cuBLASLt takes, of its own or shared with cuBLAS.
WORKSPACES = {
    "default": {},
    "cuBLAS :0:0, cuBLASLt 1, separate": {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    | {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"},
    "cuBLAS :1:1, cuBLASLt 1": {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":1:1"},
}
DTYPE, STEPS, TEMPERATURE = torch.bfloat16, 20, 1.0
COMMON: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 40960, "attention_dropout": 0.0}
# Shapes of Llama-3.2-1B with half its layers, of Qwen3-0.6B, and of a Qwen3-MoE of 0.5 billion parameters.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64},
    "qwen3": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3_moe": {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 512, "norm_topk_prob": True},
}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 97, "head_dim": 16}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 32}
# N x K of their products, of Qwen3-30B-A3B's, and two of which torch is known to split K.
SHAPES = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (4096, 1024), (1024, 2048), (6144, 1024)]
SHAPES += [(1024, 3072), (32000, 2048), (5120, 2048), (2048, 4096), (256, 8192)]
ATTENTION = ops.causal_attention  # which a part replaces
ROWS = (1, 8, 64, 128, 512, 2048, 8192)


def values(name: str, device: str) -> dict[str, Any]:
    """A model's config.json."""
    kind = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[name]
    sizes = MODELS[name] if device != "cpu" else {**MODELS[name], **TINY}
    return {**COMMON, **sizes, "architectures": [kind], "model_type": name}


def trainer(name: str, device: str) -> Any:
    """A model of transformers in bf16, with weights that let tokens differ."""
    import transformers

    config = transformers.AutoConfig.for_model(**values(name, device))
    with torch.device(device):
        hf = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for each in hf.parameters():
            if each.dim() > 1:
                each.normal_(std=each.shape[-1] ** -0.5, generator=generator)
    hf.config.use_cache = False
    return hf.train()


# ---- a trainer and the engine, 20 steps


def stock_logprobs(hf: Any, sequences: list[list[int]]) -> list[Tensor]:
    """What transformers and torch compute."""
    packed = nn.pack(sequences, next(hf.parameters()).device)
    logits = hf(input_ids=packed.token_ids[None], position_ids=packed.positions[None]).logits[0, packed.scored - 1]
    logprobs = F.log_softmax(logits.float(), -1).gather(1, packed.token_ids[packed.scored][:, None]).squeeze(1)
    return list(logprobs.split([len(each) - 1 for each in sequences]))


def logprobs_of_answers(outputs: list[Any], logprobs: Any) -> list[Tensor]:
    """Return those of the answers; logprobs: of all tokens but the first of each sequence."""
    return [x[len(each.prompt_ids) - 1 :] for x, each in zip(logprobs, outputs, strict=True)]


def of_answers(outputs: list[Any], version: str, logprobs: Any) -> exact.Scores:
    """Return a trainer's log-probabilities of the answers, see `logprobs_of_answers`."""
    own = logprobs_of_answers(outputs, logprobs)
    return exact.Scores(token_ids=[each.token_ids for each in outputs], logprobs=own, versions=(version,))


def steps(name: str, device: str) -> dict[str, Any]:
    """Sample, certify, update the weights by AdamW; 20 times."""
    hf = trainer(name, device)
    served = random_model(values(name, device), device=device, dtype=DTYPE)
    llm = LLM(model=served, device=device, num_blocks=512, max_num_seqs=8, max_num_batched_tokens=256)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-4, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    report: dict[str, Any] = {"mismatches": 0, "tokens": 0, "steps": 0}
    for step in range(STEPS):
        llm.update_weights(((key, each.detach()) for key, each in hf.named_parameters()), version=f"step {step}")
        lengths = torch.randint(1, 300 if device != "cpu" else 20, (8,), generator=generator).tolist()
        most = values(name, device)["vocab_size"]
        prompts = [torch.randint(1, most, (length,), generator=generator).tolist() for length in lengths]
        params = SamplingParams(max_tokens=32, temperature=TEMPERATURE, seed=step, logprobs=0, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        rollout, sequences = exact.Scores.of(outputs), [each.prompt_ids + each.token_ids for each in outputs]
        scores = functools.partial(of_answers, outputs, f"step {step}")
        answered = functools.partial(logprobs_of_answers, outputs)
        if step == 0:
            with torch.no_grad():
                stock = torch.cat(answered(stock_logprobs(hf, sequences))).cpu()
            sampled = torch.tensor([x for each in rollout.logprobs for x in each])
            report["stock_other_bits"] = f"{int((stock != sampled).sum())} of {len(sampled)}"
            report["stock_largest"] = float((stock - sampled).abs().max())
            report["replaced"] = len(exact.install(hf).replaced)
        with torch.no_grad():
            again = scores(exact.sequence_logprobs(hf, sequences))
        own = exact.sequence_logprobs(hf, sequences)
        first = scores(own)
        try:
            exact.certify(rollout, first, recomputed=again)
        except exact.NotExactError as error:
            report["mismatches"] += len(error.certificate.mismatches)
            report.setdefault("first", str(error))
        report["tokens"] += sum(map(len, rollout.token_ids))
        report["steps"] += 1
        advantages = torch.randn(len(own), generator=generator).tolist()
        optimizer.zero_grad()
        losses = [-weight * x.mean() for weight, x in zip(advantages, answered(own), strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        print(json.dumps(report), flush=True)
    return report


# ---- what torch's products give


def bits(name: str, device: str) -> dict[str, Any]:
    """Compare torch's products of every shape with whorl's kernels. name: of WORKSPACES."""
    from whorl.ops.linear_triton import _ours

    differ: dict[str, list[str]] = {}
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        differ[library] = []
        failed = ""
        for columns, length in SHAPES:
            generator = torch.Generator(device).manual_seed(0)
            weight = torch.randn(columns, length, device=device, generator=generator).to(DTYPE)
            x = torch.randn(max(ROWS), length, device=device, generator=generator).to(DTYPE)
            expected = _ours(x, weight)
            for rows in ROWS:
                try:
                    actual = F.linear(x[:rows], weight)
                except RuntimeError as error:  # too little workspace
                    failed = str(error)
                    continue
                if not torch.equal(actual, expected[:rows]):
                    differ[library].append(f"{rows}x{columns}x{length}")
        if failed:
            differ[library].append(f"(not all ran: {failed})")
    return {"shapes": len(SHAPES) * len(ROWS), "differ": differ, "workspace": name}


# ---- what others report


def failures(name: str, device: str) -> dict[str, Any]:
    model = random_model(values("qwen3_moe", device), device=device, dtype=DTYPE)
    settings = {"device": device, "num_blocks": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    settings |= {"block_size": 8} if device == "cpu" else {}

    def make(**changes: Any) -> LLM:
        return LLM(model=model, **{**settings, **changes})

    report: dict[str, Any] = {}
    for title, check in FAILURES.items():
        report[title] = check(make)
        print(json.dumps(report), flush=True)
    return report


# ---- what it costs


def free_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, **options: Any) -> tuple[Tensor, None]:
    """torch's attention for sequences of one length; it takes what `ops.causal_attention` does."""
    count = len(starts) - 1
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True)
    return y.transpose(1, 2).flatten(0, 1), None


class TorchGradient(torch.autograd.Function):
    """whorl's attention with the gradient of torch's flash attention, whose bits nobody promises."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
        out, lse = ATTENTION(q, k, v, starts, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, starts)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, starts = ctx.saved_tensors
        longest, state = int(starts.diff().max()), torch.zeros(2, dtype=torch.uint64, device=q.device)
        saved = (dout.contiguous(), q, k, v, out, lse.t().contiguous(), starts, starts, longest, longest)
        grads = torch.ops.aten._flash_attention_backward(*saved, 0.0, True, state, state, scale=ctx.scale)
        return *grads, None, None


def with_torch_gradient(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, **options: Any) -> tuple[Tensor, None]:
    return TorchGradient.apply(q, k, v, starts, options["scale"]), None


def gradient_errors(device: str) -> list[float]:
    """Errors of q's, k's and v's gradients against fp64 on the host: of whorl's gradient, then of torch's."""
    lengths = (130, 257, 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = (sum(lengths), 4, 128), (sum(lengths), 2, 128)
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(*shapes[i > 0], generator=generator).to(DTYPE) for i in range(3)]
    dout = torch.randn(*shapes[0], generator=generator).to(DTYPE)

    def gradients(function: Callable[..., Any], where: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(where, dtype).requires_grad_() for x in host]
        out, _ = function(*inputs, starts.to(where), scale=128**-0.5)
        return [x.cpu().double() for x in torch.autograd.grad(out, inputs, dout.to(where, dtype))]

    expected = gradients(ATTENTION, "cpu", torch.float64)
    actual = [gradients(function, device, DTYPE) for function in (ATTENTION, with_torch_gradient)]
    return [float((x - y).norm() / y.norm()) for each in actual for x, y in zip(each, expected, strict=True)]


def free_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def training(device: str) -> Iterator[tuple[str, float, float]]:
    """Yield rows: what trains, milliseconds of a forward, and of a forward and backward."""
    count, length = (8, 1024) if device != "cpu" else (2, 32)
    generator = torch.Generator().manual_seed(0)
    config = values("qwen3", device)
    ids = torch.randint(config["vocab_size"], (count, length), generator=generator).to(device)

    def times(hf: Any) -> tuple[float, float]:
        def forward() -> Tensor:
            hidden = hf.model(input_ids=ids, use_cache=False).last_hidden_state  # without the head, the same for all
            return hidden.float().square().mean()

        def both() -> None:
            forward().backward()

        with torch.no_grad():
            seconds = median_time(device, forward, 5)
        return seconds * 1e3, median_time(device, both, 5) * 1e3

    hf = trainer("qwen3", device)
    yield "transformers, sdpa", *times(hf)
    installation = exact.install(hf)
    yield "exact", *times(hf)
    with patch.object(ops, "linear", free_linear):
        yield "exact, but cuBLAS freely chosen", *times(hf)
        with patch.object(ops, "causal_attention", free_attention):
            yield "exact, but torch's attention and cuBLAS freely chosen", *times(hf)
    if device != "cpu":
        with patch.object(ops, "causal_attention", with_torch_gradient):
            yield "exact, with the gradient of torch's attention", *times(hf)
    installation.uninstall()
    exact.install(hf, tp_segments=8)
    yield "exact, tp_segments=8", *times(hf)


def serving(name: str, device: str, segments: int) -> dict[str, float]:
    """Milliseconds of a step that decodes 1, 8 and 64 sequences, and of a prompt of 4096 tokens."""
    config = values(name, device)
    model = build(config, device=device, dtype=DTYPE, tp=nn.Ranks(segments=segments))
    generator = torch.Generator(device).manual_seed(0)
    for _, layer in nn.weighted(model):
        layer.randomize(generator)
    report = {}
    for batch in (1, 8, 64) if device != "cpu" else (1,):
        llm = LLM(model=model, device=device, num_blocks=1024, max_num_seqs=batch, use_prefix_cache=False)
        run = functools.partial(start, llm, config["vocab_size"], batch, 16)
        for count in (16, 16, 64):  # the first ones compile, and record graphs
            report[f"decode {batch}"] = time_steps(llm, run(count), count) * 1e3
    length = 4096 if device != "cpu" else 64
    llm = LLM(model=model, device=device, num_blocks=1024, max_num_seqs=1, use_prefix_cache=False)
    prompt = [1 + i % 90 for i in range(length)]
    params = SamplingParams(max_tokens=1, temperature=0)
    report[f"prompt {length}"] = 1e3 * median_time(device, lambda: llm.generate([prompt], params, progress=False), 3)
    return report


def products(device: str) -> Iterator[tuple[str, float, float]]:
    """Yield rows: a product, microseconds of whorl's linear, and of torch's, freely chosen."""
    for columns, length in ((4096, 1024), (6144, 1024), (5120, 2048), (2048, 4096)):
        for rows in (1, 8, 64, 512, 8192) if device != "cpu" else (1,):
            weights = [torch.randn(columns, length, device=device).to(DTYPE) for _ in range(4)]
            x = torch.randn(rows, length, device=device).to(DTYPE)
            calls = [[functools.partial(run, x, w) for w in weights] for run in (ops.linear, F.linear)]
            with torch.inference_mode():
                ours, theirs = (measure(runs, device).us for runs in calls)
            yield f"{rows} x {columns} x {length}", ours, theirs


def costs(name: str, device: str) -> dict[str, Any]:
    """Everything that is timed; a part that fails does not hide the others."""
    parts: dict[str, Callable[[], Any]] = {
        "training": lambda: list(training(device)),
        "gradient_errors": lambda: gradient_errors(device) if device != "cpu" else [],
        "products": lambda: list(products(device)),
        "serving": lambda: {str(n): serving("qwen3", device, n) for n in (0, 8)},
        "serving_moe": lambda: {str(n): serving("qwen3_moe", device, n) for n in (0, 8)},
    }
    report: dict[str, Any] = {}
    for part, run in parts.items():
        began = time.perf_counter()
        try:
            report[part] = run()
        except Exception as error:
            report[part] = f"{type(error).__name__}: {error}"
        report[f"{part}_s"] = round(time.perf_counter() - began, 1)
        print(json.dumps(report), flush=True)  # what is there, should time run out
    return report


# ---- all of it

PARTS: dict[str, Callable[[str, str], dict[str, Any]]] = {"steps": steps, "bits": bits, "failures": failures}
PARTS |= {"costs": costs}


def collect(jobs: list[tuple[str, str]], device: str, deadline: float) -> dict[str, Any]:
    """Run parts side by side, and return their last line of output; those that are late are ended."""
    with ExitStack() as stack:
        running = {}
        for part, name in jobs:
            env = {**os.environ, **WORKSPACES.get(name, {})}
            command = [sys.executable, "-m", "bench.exactness", part, name, "--device", device]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            stack.callback(process.kill)
            running[f"{part} {name}"] = process
        return {job: outcome(process, deadline) for job, process in running.items()}


def outcome(process: "subprocess.Popen[str]", deadline: float) -> Any:
    try:
        out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\nended: out of time"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    failed = "" if process.returncode == 0 else "\n".join(err.splitlines()[-12:])
    if not lines:
        return {"failed": failed or "no output"}
    return {**json.loads(lines[-1]), **({"failed": failed} if failed else {})}


def show_bits(answers: dict[str, Any]) -> None:
    print("\n| model | steps | tokens | other bits | transformers as it is: other bits | largest difference |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        each = answers[f"steps {model}"]
        names = ("steps", "tokens", "mismatches", "stock_other_bits", "stock_largest")
        print(f"| {model} |", " | ".join(str(each.get(name)) for name in names), "|")
    print("\n| reported failure | other bits |\n|---|---|")
    for title in FAILURES:
        print(f"| {title} | {answers['failures moe'].get(title)} |")
    print("\n| torch's products, workspace | library | shapes with other bits |\n|---|---|---|")
    for name in WORKSPACES:
        each = answers[f"bits {name}"]
        for library, differ in each.get("differ", {}).items():
            print(f"| {name} | {library} | {len(differ)} of {each['shapes']}: {', '.join(differ)} |")
    show_rest(answers)


def show_costs(answers: dict[str, Any]) -> None:
    costs = answers["costs all"]
    print("\n| training, Qwen3-0.6B's shape, 8 x 1024 tokens | forward ms | forward and backward ms |\n|---|---|---|")
    for row in costs.get("training", ()) if isinstance(costs.get("training"), list) else ():
        print(f"| {row[0]} | {row[1]:.1f} | {row[2]:.1f} |")
    print("\n| product | whorl us | torch us | ratio |\n|---|---|---|---|")
    for row in costs.get("products", ()) if isinstance(costs.get("products"), list) else ():
        print(f"| {row[0]} | {row[1]:.1f} | {row[2]:.1f} | {row[1] / row[2]:.2f} |")
    print("\n| engine, ms a step | plain | tp_segments=8 | ratio |\n|---|---|---|---|")
    for part in ("serving", "serving_moe"):
        if isinstance(costs.get(part), dict):
            plain, cut = costs[part]["0"], costs[part]["8"]
            for name in plain:
                print(f"| {part}: {name} | {plain[name]:.3f} | {cut[name]:.3f} | {cut[name] / plain[name]:.2f} |")
    print("\nerrors of attention's gradients, whorl's q k v, torch's q k v:", costs.get("gradient_errors"))
    print({name: value for name, value in costs.items() if name.endswith("_s") or isinstance(value, str)})
    show_rest(answers)


def show_rest(answers: dict[str, Any]) -> None:
    """Print what went wrong."""
    for job, each in answers.items():
        for key in ("failed", "first"):
            if key in each:
                print(f"\n{job}: {key}: {each[key]}")


app = typer.Typer(add_completion=False)


@app.command()
def main(
    part: Annotated[str, typer.Argument(help=f"One part, as JSON: {', '.join(PARTS)}. Default: all")] = "",
    name: Annotated[str, typer.Argument(help="A model, or a workspace of torch")] = "all",
    device: str = "cuda",
) -> None:
    """Compare bits of training and sampling, and time what they cost."""
    if part and part not in PARTS:
        raise typer.BadParameter(f"{part!r}, expected one of {', '.join(PARTS)}")
    if part:
        print(json.dumps(PARTS[part](name, device)), flush=True)
        return
    began = time.monotonic()
    jobs = [("steps", model) for model in MODELS] + [("failures", "moe")]
    jobs += [("bits", name) for name in WORKSPACES] if device != "cpu" else []
    answers = collect(jobs, device, began + 0.65 * BUDGET)
    answers |= {f"bits {name}": {} for name in WORKSPACES if f"bits {name}" not in answers}
    show_bits(answers)
    print(f"\n{time.monotonic() - began:.0f} s", flush=True)
    show_costs(collect([("costs", "all")], device, began + BUDGET))
    print(f"{time.monotonic() - began:.0f} s", json.dumps(provenance(device)))


if __name__ == "__main__":
    app()
