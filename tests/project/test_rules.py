"""The rules of the house, as tests: who imports whom, what is public, what an import may do."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whorl
from whorl import ops
from whorl.ops import OPS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "whorl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_SOURCES = sorted(path for part in ("whorl", "tests", "bench", "examples") for path in (ROOT / part).rglob("*.py"))
ids = {"ids": lambda path: str(path.relative_to(ROOT))}

# Who may import whom; None: anything.
MAY_IMPORT: dict[str, set[str] | None] = {
    "__init__": {"ops", "engine"},
    "__main__": {"startup", "cli"},
    "startup": set(),
    "device": set(),
    "cases": set(),
    "timing": {"device"},
    "streams": {"device"},
    "fields": set(),
    "options": {"fields", "extras", "files"},
    "pasted": {"options"},
    "rope_config": set(),
    "contracts": set(),
    "positions": {"rope_config"},
    "host_memory": set(),
    "files": set(),
    "extras": {"__init__"},
    "sandbox": set(),
    "checkpoint_index": set(),
    "digests": set(),
    "ops": {"device", "contracts", "host_memory"},
    "judge": {"ops", "device", "cases"},
    "rope_table": {"rope_config", "ops", "device"},
    "ascend": {"ops", "contracts"},
    "collectives": {"ops"},
    "nn": {"device", "collectives", "rope_config", "rope_table", "ops"},
    "models": {"device", "nn", "ops", "rope_config", "rope_table", "positions"},
    "passes": {"collectives", "ops", "device", "contracts"},
    "media": {"extras", "sandbox"},
    "engine": {
        "checkpoint_index",
        "collectives",
        "device",
        "digests",
        "fields",
        "files",
        "host_memory",
        "media",
        "models",
        "nn",
        "ops",
        "passes",
        "positions",
        "streams",
    },
    "serve": {"engine", "extras", "fields", "media", "sandbox", "startup", "streams"},
    "rl": {"engine", "nn", "serve", "streams"},
    "cluster": {"engine", "extras", "fields", "serve"},
    "chat": {"engine", "extras", "fields", "media", "options", "serve", "startup"},
    "doctor": {"contracts", "models", "plan", "positions", "rope_config"},
    "plan": {"fields", "models"},
    "titan": {"checkpoint_index", "device", "digests", "extras", "files", "judge", "models", "ops", "plan", "streams"},
    "adapters": {"ops", "positions", "rope_config", "rope_table", "doctor"},
    "exact": {"adapters", "models", "nn", "ops"},
    "selftest": {"ops", "device", "cases", "judge", "timing"},
    "selftest_ranks": None,
    "bench": None,
    "cli": None,
    "commands": None,
}
# Torch may be imported inside their functions only.
WITHOUT_TORCH = ("rope_config", "contracts", "doctor", "plan", "cli", "options", "fields", "pasted", "media")
WITHOUT_TORCH += ("__main__", "commands", "startup", "files", "extras", "sandbox")
LAZY = (
    "triton",
    "torch_npu",
    "transformers",
    "fastapi",
    "megatron",
    "matplotlib",
    "liger_kernel",
    "torchtitan",
    "httpx",
    "ray",
    "verl",
    "monarch",
    "torchstore",
)
WITH_FASTAPI = ("routes",)  # of whorl/rl: imported with --rl only; FastAPI reads their annotations
WITH_RAY = ("ray_router",)  # of whorl/cluster: extends a class of Ray's, which imports it by name
# Of whorl/rl: they extend classes of trainers, which import them by name.
OF_TRAINERS = {"verl": {"verl", "ray"}, "verl_server": {"verl", "ray"}, "titan": {"monarch"}}
# Of whorl/titan: what runs before TorchTitan is known to be there. The rest extends its classes.
WITHOUT_TORCHTITAN = ("__init__", "config", "cpu", "display", "moments", "moments_triton", "register")
WITHOUT_TORCHTITAN += ("rotary", "swap_memory", "swap_optimizer", "swap_update", "train_command")
WITHOUT_TORCHTITAN += ("worker",)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(node: ast.AST, path: Path) -> list[str]:
    """Absolute names of the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = [*path.relative_to(ROOT).parent.parts]
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    for node in ast.walk(tree or ast.parse(path.read_text())):
        yield from imported(node, path)


def on_import(path: Path) -> Iterator[str]:
    """What importing the module imports: not what its functions do when called, nor what only type checkers see."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        yield from imported(node, path)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not is_typing and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", SOURCES, **ids)
def test_import_direction(path: Path) -> None:
    me = part_of(path)
    assert me in MAY_IMPORT, f"say in MAY_IMPORT what {me} may import"
    allowed = MAY_IMPORT[me]
    for name in imports(path):
        head, *rest = name.split(".")
        if head == "whorl" and rest and allowed is not None and rest[0] in MAY_IMPORT:
            assert rest[0] == me or rest[0] in allowed, f"{me} may not import {name}"


@pytest.mark.parametrize("path", SOURCES, **ids)
def test_what_is_optional_is_imported_where_used(path: Path) -> None:
    own = {"triton"} if path.name.endswith("triton.py") else set()
    if part_of(path) == "cluster" and path.stem in WITH_RAY:
        own = {"ray"}
    if part_of(path) == "rl":
        own = {"fastapi"} if path.stem in WITH_FASTAPI else OF_TRAINERS.get(path.stem, set())
    if part_of(path) == "titan" and path.stem not in WITHOUT_TORCHTITAN:
        own = {"torchtitan"}
    for name in on_import(path):
        top = name.split(".")[0]
        assert top not in LAZY or top in own, f"{name} is imported at the top"
        assert top != "torch" or part_of(path) not in WITHOUT_TORCH, f"{name} is imported at the top"


# Not even inside their functions.
NEVER_TORCH = ("plan",)


@pytest.mark.parametrize("path", [path for path in SOURCES if part_of(path) in NEVER_TORCH], **ids)
def test_what_needs_no_torch_never_asks_for_it(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"torch", *LAZY})


# Our model's name; TorchTitan's own deepseek_v3 is one of the models that converters serve.
OUR_MODEL = re.compile(r"deepseek(?![-_]?v3(?!_?2|\.2))", re.IGNORECASE)
TABLES = ("register.py", "converters/table.py")


@pytest.mark.parametrize("path", [path for path in SOURCES if part_of(path) == "titan"], **ids)
def test_only_tables_of_titan_name_the_model(path: Path) -> None:
    where = path.relative_to(PACKAGE / "titan").as_posix()
    if where.startswith("deepseek_v32/"):
        return
    named = OUR_MODEL.search(path.read_text()) is not None
    assert named == (where in TABLES), "what says DeepSeek-V3.2 is in whorl/titan/deepseek_v32"


def test_the_rule_tells_our_model_from_torchtitans() -> None:
    ours = ("DeepSeek's attention", "DeepSeek-V3.2", "deepseek_v32", "DeepSeekV32Args", "deepseek-v3.2")
    theirs = ("deepseek_v3", "torchtitan.models.deepseek_v3.model", "DeepSeekV3StateDictAdapter")
    assert all(map(OUR_MODEL.search, ours))
    assert not any(map(OUR_MODEL.search, theirs))


@pytest.mark.parametrize("path", ALL_SOURCES, **ids)
def test_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in ("utils", "common", "helpers", "manager", "base"), "a file is named for what is in it"
    assert text.isascii(), [line for line in text.splitlines() if not line.isascii()]


# ---- public names


def test_public_names() -> None:
    assert sorted(whorl.__all__) == ["LLM", "SamplingParams", "__version__", "ops"]
    promised = {
        "OPS",
        "Op",
        "add_rms_norm",
        "causal_attention",
        "causal_bounds",
        "choose_attention",
        "delta_tensors",
        "dequantize",
        "dynamic_quant",
        "experts",
        "grouped_matmul",
        "hadamard",
        "indexer_kl_loss",
        "indexer_rope",
        "lightning_indexer",
        "linear",
        "log_softmax",
        "masked_attention",
        "merge_mrope",
        "packed_attention",
        "paged_attention",
        "penalize",
        "permute",
        "qk_norm_rope",
        "qk_norm_rope_write",
        "register_backend",
        "rms_norm",
        "rope",
        "rope_",
        "route",
        "sample",
        "selection_mask",
        "sparse_attention",
        "token_logprobs",
        "tokens_first",
        "unpermute",
        "write_kv",
    }
    assert promised <= set(ops.__all__)
    more = set(ops.__all__) - promised
    assert all(name in OPS for name in more), f"{more}: a name that is no operator is promised here, on purpose"
    assert all(hasattr(ops, name) for name in ops.__all__)
    with pytest.raises(AttributeError, match="module 'whorl' has no attribute 'wrong'"):
        _ = whorl.wrong


def test_operators() -> None:
    forward = {"rope", "rope_", "qk_norm_rope", "rms_norm", "add_rms_norm", "glu"}
    forward |= {"sparse_attention", "masked_attention", "causal_attention", "packed_attention", "hadamard"}
    forward |= {"route", "permute", "unpermute", "grouped_matmul", "linear", "experts", "log_softmax", "token_logprobs"}
    backward = {"qk_norm_rope_backward", "rms_norm_backward", "glu_backward"}
    backward |= {"sparse_attention_backward", "masked_attention_backward"}
    backward |= {"causal_attention_backward", "packed_attention_backward"}
    backward |= {"route_backward", "permute_backward", "unpermute_backward", "grouped_matmul_backward"}
    backward |= {"log_softmax_backward", "token_logprobs_backward"}
    inference = {"write_kv", "paged_attention", "sample", "dynamic_quant", "dequantize"}
    inference |= {"qk_norm_rope_write", "norm_linear"}
    inference |= {"selection_mask", "lightning_indexer", "index_scores", "top_k"}
    inference |= {"indexer_target", "indexer_kl", "indexer_kl_gradients"}  # loss and gradient in one
    promised = forward | backward | inference
    assert promised <= set(OPS)
    assert {name for name in promised if OPS[name].forward_only} == inference | {"rope_"}
    assert {name for name in forward if isinstance(getattr(ops, name), ops.Op)} == forward
    hidden = {name for name in OPS if name.startswith("indexer_")}
    assert {name for name in OPS if not name.endswith("_backward")} - hidden <= set(ops.__all__)


# ---- operators


@pytest.mark.parametrize("name", OPS)
def test_an_operator_is_whole(name: str) -> None:
    op = OPS[name]
    doc = op.__doc__ or ""
    assert len(op.cases) >= 5, "cases: tiny, odd, empty, strided and small-valued"
    assert op.bench_cases
    assert any(0 in (c.get("tokens") or c.get("shape")) for c in op.cases), "no case without tokens"
    assert any(c.get("sliced") for c in op.cases), "no case with strides"
    assert any(c.get("scale", 1) < 1 for c in op.cases), "no case with small values"
    says_shapes = re.search(r"\[[^\]]*\w[^\]]*\]", doc) or any(f"`{other}`" in doc for other in OPS if other != name)
    assert op.spec.tensors or says_shapes, "the contract says shapes, or whose they are"
    for backend in ("triton", "torch_npu"):
        has, says = backend in op.impls, backend in op.without
        assert has != says, f"{backend}: an implementation, or in `without` the reason that there is none"


BACKWARD: dict[str, tuple[str, ...]] = {
    "add_rms_norm": ("rms_norm_backward",),
    "linear": (),  # torch's own products
    "rope": ("rope",),  # the inverse rotation
    "hadamard": ("hadamard",),  # its matrix is symmetric
    "experts": ("permute_backward", "grouped_matmul_backward", "glu_backward", "unpermute_backward"),
    "clipped_experts": ("permute_backward", "grouped_matmul_backward", "unpermute_backward"),
}


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if not op.forward_only and not n.endswith("_backward")])
def test_a_backend_that_goes_forward_comes_back(name: str) -> None:
    for backward in BACKWARD.get(name, (f"{name}_backward",)):
        assert set(OPS[name].impls) <= set(OPS[backward].impls)


# ---- imports


def python(code: str) -> Any:
    """What the code prints as JSON, in a fresh interpreter without the tests' settings."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_loads_nothing_optional() -> None:
    code = "import json, sys, whorl, whorl.ops, whorl.doctor, whorl.cli; print(json.dumps(list(sys.modules)))"
    loaded = {name.split(".")[0] for name in python(code)}
    assert loaded.isdisjoint(LAZY)
    assert "whorl.ops" in python("import json, sys, whorl; whorl.ops; print(json.dumps(list(sys.modules)))")
    assert "torch" not in python("import json, sys, whorl, whorl.doctor; print(json.dumps(list(sys.modules)))")


NO_TORCH = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        is_gone = name.split(".")[0] in ("torch", "triton", "torch_npu", "transformers", "torchtitan")
        return None if is_gone else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def test_the_doctor_works_without_torch() -> None:
    code = f"""{NO_TORCH}
import dataclasses, json
from whorl.doctor import check
print(json.dumps([f.code for f in check("examples/qwen3_vl_rope_branch").findings]))
"""
    assert "rope-branch-mismatch" in python(code)


WITHOUT = {"--help": 0, "doctor examples/qwen3_vl_fixed --json": 0, "doctor examples/qwen3_vl_rope_branch": 1, "ops": 2}
WITHOUT |= {"train --plan deepseek-v3.2 --cards 64 --seq 32768": 0}


@pytest.mark.parametrize(("arguments", "exit_code"), WITHOUT.items())
def test_the_command_works_without_torch(arguments: str, exit_code: int) -> None:
    code = f"{NO_TORCH}\nsys.argv = ['whorl', *{arguments.split()!r}]\nfrom whorl.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == exit_code, done.stderr
    assert exit_code < 2 or "needs torch: pip install torch" in done.stderr


def test_importing_changes_nothing() -> None:
    """Of what others own: functions, classes and modules of torch, its switches, the process."""
    code = """
import json, os, signal, sys, warnings
import torch, torch.nn.functional, torch.distributed, torch.library

def state():
    owners = [torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.autograd, torch.library, torch.ops,
              torch._C, torch.distributed, torch.nn.RMSNorm, json, os, sys, warnings]
    found = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if callable(value):
                found[f"{owner.__name__}.{name}"] = id(value)
    found["argv"], found["environ"], found["filters"] = list(sys.argv), dict(os.environ), len(warnings.filters)
    found["hooks"] = [id(sys.excepthook), id(sys.displayhook), len(sys.meta_path), len(sys.path_hooks)]
    found["switches"] = [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
                         torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                         torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()]
    found["signals"] = str(signal.getsignal(signal.SIGINT))
    return found

sys.argv = ["train.py", "--device", "npu", "--help"]
before = state()
import whorl, whorl.ops, whorl.doctor, whorl.ascend, whorl.adapters, whorl.rope_table, whorl.positions, whorl.cli
after = state()
print(json.dumps(sorted(k for k in before if after.get(k) != before[k])))
"""
    assert python(code) == []
