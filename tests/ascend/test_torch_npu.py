"""Our Ascend call sites against the real torch_npu package, without an NPU.

The wheel is taken from WHORL_TORCH_NPU_WHEEL or from pip, stand-ins for the CANN libraries are built with gcc, and
npu/prove.py runs in a process of its own over both; what it writes is judged here. Everything is kept in
.cache/torch_npu, so only the first run downloads and builds.
"""

import fcntl
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import types
import typing
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import ROOT, python_path

from whorl import ascend, contracts
from whorl.ops import OPS

VERSION = "2.13.0"
HERE = Path(__file__).parent
CACHE = ROOT / ".cache" / "torch_npu"
STUB, PROVE = HERE / "npu" / "cann_stub.py", HERE / "npu" / "prove.py"

NAMES = [name for name in ascend.__all__ if name != "limits"]
NPU_OPS = [op.name for op in OPS.values() if "torch_npu" in op.impls]
ONLY_16_BITS = (
    "clipped_experts",
    "dynamic_quant",
    "indexer_kl_gradients",
    "int8_experts",
    "int8_linear",
    "latent_attention",
    "lightning_indexer",
    "packed_experts",
    "packed_linear",
    "paged_attention",
    "paged_indexer",
    "sparse_attention",
    "sparse_attention_backward",
)
# In 16 bits torch_npu rounds the table too, and a fused operator may round between its parts. Each case is drawn six
# times: a draw of qk_norm_rope's gradient of 64 weights was seen at 2.2, twelve of them together at 1.6.
ALLOWED = 2.0
# Small operators of torch alone: torch_npu's gradient came in 2.11 and does not say its formula; its log_softmax is
# torch's.
PLAIN = (
    "route_backward",
    "log_softmax",
    "log_softmax_backward",
    "packed_attention_backward",
    "token_logprobs",
    "token_logprobs_backward",
)
# The first release that has what the call needs; in older ones the reference runs.
LATER = {"write_kv": "2.10", "qk_norm_rope_write": "2.10"}
PARTLY_LATER = {"indexer_kl_gradients": "2.10"}  # without indices


@contextmanager
def locked() -> Iterator[None]:
    """One process builds, the others wait and find it built."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_wheel(version: str) -> Path:
    wheel = os.environ.get("WHORL_TORCH_NPU_WHEEL")
    if wheel and version == VERSION:
        return Path(wheel)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"torch_npu-{version}-{python}-*_{platform.machine()}.whl"
    if not (wheels := list(CACHE.glob(pattern))):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        where = ["--timeout=20", "--retries=1", f"--dest={CACHE}", f"torch-npu=={version}"]
        ran = subprocess.run(pip + where, capture_output=True, text=True)
        wheels = list(CACHE.glob(pattern))
        if ran.returncode or not wheels:
            reason = (ran.stderr.strip().splitlines() or ["pip downloaded nothing"])[-1]
            pytest.skip(f"the torch-npu {version} wheel cannot be had: {reason}")
    return wheels[0]


def run_proof(out: Path, parts: list[str], script: Path = PROVE, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(script), str(out), *parts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode or not out.exists():
        pytest.fail(f"{script.name} exited with {ran.returncode}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return json.loads(out.read_text())


def require_tools() -> None:
    if torch.__version__.split("+")[0] != VERSION:
        pytest.skip(f"torch_npu {VERSION} needs torch {VERSION}, this is {torch.__version__}")
    if torch.version.cuda is not None:
        pytest.skip("torch_npu does not import next to a CUDA build of torch")
    if missing := [tool for tool in ("gcc", "nm", "readelf", "ldd") if shutil.which(tool) is None]:
        pytest.skip(f"the stub libraries need {', '.join(missing)}")


def live_environment(built: Path) -> dict[str, str]:
    """In which `import torch_npu` works, and there is a device to make FakeTensors for."""
    return {
        "LD_LIBRARY_PATH": str(built / "stub"),
        "PYTHONPATH": python_path(built),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "STUB_NPU_COUNT": "1",
    }


@pytest.fixture(scope="session")
def proof(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_tools()
    # Workers of one run share the folder above their own, and what the first of them found.
    folder = tmp_path_factory.getbasetemp()
    out = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "torch_npu_proof.json"
    with locked():
        if out.exists():
            return json.loads(out.read_text())
        environment = live_environment(build(find_wheel(VERSION)))
        return run_proof(out, ["signatures", "gradients", "calls", "losses", "rotary", "steps", "fake"], **environment)


def build(wheel: Path) -> Path:
    """A folder with the unpacked package and its stub libraries; its name says what they were made of."""
    made_of = f"{wheel.name} {torch.__version__} {sys.version}".encode() + STUB.read_bytes()
    built = CACHE / f"{VERSION}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    if not built.exists():
        for old in CACHE.glob(f"{VERSION}-*"):
            shutil.rmtree(old)
        part = CACHE / f"{VERSION}-part"
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("torch_npu/") and "/include/" not in n]
            archive.extractall(part, names)
        subprocess.run([sys.executable, str(STUB), str(part / "torch_npu"), str(part / "stub")], check=True)
        part.rename(built)
    return built


# Signatures.


@pytest.mark.parametrize("name", [c.name for c in contracts.CONTRACTS.values() if c.namespace in ("npu", "atb")])
def test_contract_is_the_live_schema(proof: dict[str, Any], name: str) -> None:
    contract = contracts.CONTRACTS[name]
    parameters, returns = contracts.parse_schema(proof["signatures"][name])
    assert [(p.name, p.type, p.default, p.keyword_only) for p in contract.parameters] == [
        (p.name, p.type, p.default, p.keyword_only) for p in parameters
    ]
    assert contract.returns == returns


@pytest.mark.parametrize("name", [n for n in NAMES if contracts.CONTRACTS[n].namespace])
def test_ascend_signature_is_the_live_schema(proof: dict[str, Any], name: str) -> None:
    judge_signature(name, proof["signatures"][name])


@pytest.mark.parametrize("name", NAMES)
def test_ascend_signature_is_the_contract(name: str) -> None:
    """The wheel is not needed here."""
    judge_signature(name, contracts.CONTRACTS[name].schema)


def judge_signature(name: str, schema: str) -> None:
    # In Python a SymInt is an int, and a list says nothing of its length.
    parameters, returns = contracts.parse_schema(schema.replace("SymInt", "int").replace("int[2]", "int[]"))
    assert python_signature(getattr(ascend, name)) == (
        [(p.name, p.type, p.default, p.keyword_only) for p in parameters],
        len(returns),
    )


def test_mindspeed_signature() -> None:
    """MindSpeed's is a Python function: npu_rotary_position_embedding(x, cos, sin, mode=0)."""
    required = contracts.REQUIRED
    assert python_signature(ascend.npu_rotary_position_embedding) == (
        [("x", "Tensor", required, False), ("cos", "Tensor", required, False)]
        + [("sin", "Tensor", required, False), ("mode", "int", 0, False)],
        1,
    )


def python_signature(function: Any) -> tuple[list[tuple[str, str, object, bool]], int]:
    signature = inspect.signature(function)
    parameters = []
    for p in signature.parameters.values():
        default = contracts.REQUIRED if p.default is p.empty else p.default
        parameters.append((p.name, schema_type(p.annotation), default, p.kind is p.KEYWORD_ONLY))
    returns = signature.return_annotation
    return parameters, 0 if returns is None else len(typing.get_args(returns)) or 1


def schema_type(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return schema_type(typing.get_args(annotation)[0]) + "?"
    return {list[int]: "int[]", list[torch.Tensor]: "Tensor[]"}.get(annotation) or annotation.__name__


# Gradients.


@pytest.mark.parametrize("name", [n for n in NAMES if contracts.CONTRACTS[n].namespace])
def test_gradient_is_what_the_contract_says(proof: dict[str, Any], name: str) -> None:
    assert proof["gradients"][name] == contracts.CONTRACTS[name].gradient


# Call sites of whorl.ops.


@pytest.mark.parametrize("name", NPU_OPS)
def test_call_sites_give_the_references_numbers(proof: dict[str, Any], name: str) -> None:
    judge_numbers(proof["calls"], name)


def judge_numbers(rows: list[dict[str, Any]], name: str) -> None:
    rows = [row for row in rows if row["op"] == name]
    assert rows, f"{name} has a torch_npu implementation and no cases"
    ran = [row for row in rows if "refused" not in row]
    for row in ran:
        case = f"{name} {row['case']} {row['dtype']}"
        assert "error" not in row, f"{case}:\n{row['error']}"
        is_empty = "'lengths': ()" in row["case"]  # no sequence, nothing to call
        assert row["called"] or is_empty or name in PLAIN, f"{case}: no torch_npu operator was called"
        for way in ("forward", "backward"):
            worst = row.get(way, {"ratio": 0.0})
            assert worst["ratio"] <= ALLOWED, f"{case}, {way}: error is {worst['ratio']:.2f} x allowed; {worst}"
    for dtype in ("bfloat16",) if name in ONLY_16_BITS else ("float32", "bfloat16"):
        assert any(row["dtype"] == dtype for row in ran), f"{name}: every {dtype} case was refused: {rows}"
    if f"{name}_backward" in OPS:
        assert any("backward" in row for row in ran), f"{name}: no case ran its backward"


def test_four_bits_are_packed_as_torch_npu_packs_them(proof: dict[str, Any]) -> None:
    words = proof["int4pack"]
    assert len(words["ours"]) == 3
    assert words["ours"] == words["theirs"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mrope_gets_positions_and_a_table_of_16_bits(proof: dict[str, Any], dtype: str) -> None:
    """One npu_mrope, which looks positions up in the whole table itself; the table is rounded once.

    Positions on several axes are merged before: it gets a row for each token.
    """
    rows = [row for row in proof["rotary"] if row["dtype"] == dtype]
    assert len(rows) == 6
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["called"] == ["npu_mrope"] * 2, row
        width = int(row["case"].split()[-1])
        length = 64 if row["sections"] is None else 7
        assert row["given"]["table"] == [[length, width], dtype], "rows were gathered first, or the table is fp32"
        assert row["given"]["mrope_section"] == [0, 0, 0]
        assert row["given"].get("cache_mode", "default") == "default"
        assert row["positions"], "the kernel did not get the positions as they were given"
        assert row["kept"], "the table was rounded again"
        assert row["found"]["ratio"] <= ALLOWED, row


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_megatron_reaches_mrope_with_an_inference_context(proof: dict[str, Any], dtype: str) -> None:
    (row,) = (row for row in proof["megatron"] if row["dtype"] == dtype)
    assert "error" not in row, row["error"]
    assert row["called"] == ["npu_mrope"] * 2
    assert row["calls"] == {"mrope": 2}
    assert row["handed_on"] == [None, None]
    for call, tokens in zip(row["given"], (7, 1), strict=True):
        assert call["table"] == [[tokens, 128], dtype]
        assert call["mrope_section"] == [0, 0, 0]


FUSED = {
    "selected keys": ["npu_sparse_lightning_indexer_grad_kl_loss"],
    "visible keys": ["npu_dense_lightning_indexer_grad_kl_loss", "npu_dense_lightning_indexer_softmax_lse"],
}


@pytest.mark.parametrize("name", FUSED)
def test_losses_are_one_fused_call(proof: dict[str, Any], name: str) -> None:
    """With the gradients, equal to target and divergence one after the other; and on a fake NPU."""
    rows = [row for row in proof["losses"] if row["loss"] == name]
    assert rows
    for row in rows:
        assert row["called"] == FUSED[name]
        assert row["found"]["ratio"] <= ALLOWED, row
    assert name in proof["fake_losses"]


# Whole training steps: two of them, two layers, two sequences, everything computed again in backward.

EVERY_STAGE = {
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_mrope",
    "npu_rms_norm",
    "npu_rms_norm_backward",
}
STAGES = {
    "warmup": {
        "npu_fusion_attention",
        "npu_dense_lightning_indexer_softmax_lse",
        "npu_dense_lightning_indexer_grad_kl_loss",
    },
    "sparse": {
        "npu_lightning_indexer",
        "npu_sparse_flash_attention",
        "npu_sparse_flash_attention_grad",
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "npu_moe_token_permute_grad",
        "npu_moe_token_unpermute_grad",
    },
}


@pytest.fixture(params=STAGES)
def steps(request: pytest.FixtureRequest, proof: dict[str, Any]) -> dict[str, Any]:
    (row,) = (row for row in proof["steps"] if row["stage"] == request.param)
    return row


def test_training_steps_call_fused_operators(steps: dict[str, Any]) -> None:
    """Every converter, both stages: these and no others, and none of ours runs plain torch instead."""
    assert set(steps["called"]) == EVERY_STAGE | STAGES[steps["stage"]]
    assert steps["fallbacks"] == []
    loss = {"warmup": "npu_dense_lightning_indexer_grad_kl_loss", "sparse": "npu_sparse_lightning_indexer_grad_kl_loss"}
    assert steps["called"][loss[steps["stage"]]] == 2 * 2 * 2, "the indexer's loss, once for each layer and sequence"
    assert steps["not_on_npu"] == [], "operators of torch for which torch_npu has no kernel"


def test_training_steps_compute_what_they_do_on_a_cpu(steps: dict[str, Any]) -> None:
    """In bf16: the loss, each indexer's loss, and the gradient of every parameter that learns."""
    compared = dict(steps["compared"])
    assert compared.pop("loss") < 5e-4  # observed 9e-5
    losses = [compared.pop(name) for name in list(compared) if name.endswith(".kl")]
    assert len(losses) == 2
    assert max(losses) < 2e-3  # observed 4e-4
    assert len(compared) == (10 if steps["stage"] == "warmup" else 41)
    assert max(compared.values()) < 0.08, compared  # observed 0.037


def test_training_steps_move_what_learns(steps: dict[str, Any]) -> None:
    learns = [name for name in steps["moved"] if steps["stage"] == "sparse" or ".indexer." in name]
    assert steps["moved"] == learns
    assert len(learns) == (10 if steps["stage"] == "warmup" else 41), steps["frozen"]


@pytest.mark.parametrize("name", NPU_OPS)
def test_call_sites_on_a_fake_npu(proof: dict[str, Any], name: str) -> None:
    rows = [row for row in proof["fake"] if row["what"] == name]
    assert rows
    for row in rows:
        assert "error" not in row, f"{name} {row['case']}:\n{row['error']}"


@pytest.mark.parametrize("name", [n for n in NAMES if contracts.CONTRACTS[n].namespace])
def test_ascend_on_a_fake_npu(proof: dict[str, Any], name: str) -> None:
    (row,) = (row for row in proof["fake"] if row["what"] == f"ascend.{name}")
    assert "error" not in row, row["error"]


@pytest.mark.parametrize("name", [n for n in NAMES if contracts.CONTRACTS[n].namespace])
def test_on_an_npu_the_vendor_decides(proof: dict[str, Any], name: str) -> None:
    """A call beyond what we know of the documents reaches torch_npu, with every argument as it was given."""
    (row,) = (row for row in proof["beyond"] if row["name"] == name)
    assert "error" not in row, row["error"]


def test_what_is_documented_runs_on_an_npu_and_elsewhere(proof: dict[str, Any]) -> None:
    """int4, TND, routing defaults, heads of 192 with values of 128: torch_npu's shapes and dtypes in every place."""
    assert len(proof["documented"]) > 8
    for row in proof["documented"]:
        assert "error" not in row, f"{row['case']}: {row['error']}"


@pytest.mark.parametrize("name", ["npu_reduce_scatter", "npu_all_gather", "npu_all_reduce"])
def test_fused_collectives_on_a_fake_npu(proof: dict[str, Any], name: str) -> None:
    (row,) = (row for row in proof["fake"] if row["what"] == f"fused.{name}")
    assert "error" not in row, row["error"]


# Other versions: their registered schemas, which the library holds as text, without their binaries.

SHIM = """
import pathlib, torch
__version__ = {version!r}
_library = torch.library.Library("npu", "DEF")
for schema in {schemas!r}:
    _library.define(schema)
"""


def registered_schemas(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("torch_npu/lib/libtorch_npu.so")
    names = [c.name for c in contracts.CONTRACTS.values() if c.namespace == "npu"]
    pattern = rf"\0({'|'.join(names)})(\([^\0]*\) -> [^\0]+)(?=\0)".encode()
    return {name.decode(): schema.decode() for name, schema in re.findall(pattern, library)}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0"])
def test_call_sites_in_other_versions(version: str, tmp_path: Path) -> None:
    with locked():
        schemas = registered_schemas(find_wheel(version))
    judge_drift(version, schemas)
    package = tmp_path / "torch_npu"
    package.mkdir()
    text = SHIM.format(version=version, schemas=[name + schema for name, schema in schemas.items()])
    (package / "__init__.py").write_text(text)
    path = python_path(tmp_path)
    report = run_proof(tmp_path / "found.json", ["calls"], PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert report["version"] == version
    for name in NPU_OPS:
        since = LATER.get(name, version)
        if contracts.release(since) <= contracts.release(version):
            judge_numbers(report["calls"], name)
        else:
            reasons = [row["refused"] for row in report["calls"] if row["op"] == name]
            assert any(f"needs torch_npu {since} or newer" in reason for reason in reasons)
    for name, since in PARTLY_LATER.items():
        reasons = [row.get("refused", "") for row in report["calls"] if row["op"] == name]
        is_refused = any(f"needs torch_npu {since} or newer" in reason for reason in reasons)
        assert is_refused == (contracts.release(version) < contracts.release(since))


def judge_drift(version: str, schemas: dict[str, str]) -> None:
    """A parameter exists from the release that its contract names; a default differs only where `changes` says so."""
    for contract in contracts.CONTRACTS.values():
        if contract.namespace != "npu":
            continue
        is_there = contracts.release(contract.since) <= contracts.release(version)
        assert (contract.name in schemas) == is_there, f"{contract.name} in {version}"
        if not is_there:
            continue
        parameters, _ = contracts.parse_schema(schemas[contract.name])
        then = [p for p in contract.parameters if contracts.release(p.since) <= contracts.release(version)]
        names = [p.name for p in then]
        for name, (release, before) in contract.renamed.items():
            if contracts.release(version) < contracts.release(release):
                names = [before if n == name else n for n in names]
        assert [p.name for p in parameters] == names, f"{contract.name} in {version}"
        later = " ".join(
            what for since, what in contract.changes if contracts.release(since) > contracts.release(version)
        )
        for old, new in zip(parameters, then, strict=True):
            changed = f"default of {new.name} changed from {old.default} to {new.default}" in later
            assert (old.default != new.default) == changed, f"{contract.name}.{new.name} in {version}"
