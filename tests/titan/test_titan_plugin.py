"""The plug-in in TorchTitan: what it registers, that it changes nothing, what it needs of the version installed."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import titan_upstream as upstream
import torch
from folders import python_path

from whorl.titan import cpu

ROOT = Path(__file__).parents[2]
TITAN = ROOT / "whorl" / "titan"


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> None:
    pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")
    cpu.install()


def python(code: str, **environment: str) -> Any:
    """What a fresh interpreter prints last, as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- registering

CHANGES = """
import json, sys
import torchtitan.train
from torchtitan.protocols import model_converter, train_spec

def modules():
    return {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torchtitan"}

def state(names):
    found = {}
    for name in names:
        for attribute, value in vars(sys.modules[name]).items():
            # a package gets its submodules as attributes when they are imported
            if f"{name}.{attribute}" not in sys.modules:
                found[f"{name}.{attribute}"] = id(value)
            if isinstance(value, type):
                found |= {f"{name}.{attribute}.{n}": id(v) for n, v in list(vars(value).items()) if callable(v)}
    return found

from torchtitan.models import deepseek_v3, llama3, qwen3
import torchtitan.distributed.dual_pipe_v
import torch
names = list(modules())
before, histc = state(names), torch.histc
import whorl.titan
whorl.titan.register.register()  # again does nothing
after = state(names)
sys.path.insert(0, "tests/titan")
import titan_upstream as upstream
print(json.dumps({
    "changed": sorted(name for name in before if after.get(name) != before[name]),
    "histc": torch.histc is histc,
    "models": sorted(train_spec._extra_train_specs),
    "converters": sorted(n for n in model_converter._registry_model_converter_cls if "quantize" not in n),
    "drift": upstream.drift(),
}))
"""


@pytest.fixture(scope="module")
def registered() -> Any:
    return python(CHANGES)


def test_the_import_registers(registered: Any) -> None:
    names = ("dsa", "gmm", "permute", "rms_norm", "rope")
    assert registered["models"] == ["deepseek_v32"]
    assert registered["converters"] == sorted(f"{whose}_{name}" for whose in ("npu", "whorl") for name in names)


def test_nothing_of_torchtitan_is_patched(registered: Any) -> None:
    assert registered["changed"] == []
    assert registered["histc"]


def test_importing_the_package_imports_no_torchtitan() -> None:
    code = "import json, sys, whorl.titan, whorl.titan.config, whorl.titan.train_command, whorl.titan.display"
    loaded = python(f"{code}; print(json.dumps(list(sys.modules)))")
    assert "torchtitan" not in {name.split(".")[0] for name in loaded}
    assert "torch" not in loaded


# ---- drift


def test_torchtitan_is_as_expected(registered: Any) -> None:
    import torchtitan

    drift = "\n".join(registered["drift"])
    assert not drift, (
        f"TorchTitan {torchtitan.__version__} differs from {upstream.WRITTEN_FOR}, which whorl.titan is written for:\n"
        f"{drift}\nLook at what uses each name, then write down the new state in tests/titan/titan_upstream_names.py"
    )


OWN = ("self", "super()")  # whose attributes are a base class's, perhaps


def held() -> dict[str, set[str]]:
    """What the modules of whorl/titan import from TorchTitan, as module:name."""
    holders: dict[str, set[str]] = {}
    for path in TITAN.rglob("*.py"):
        if path.name == "v030.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchtitan":
                for alias in node.names:
                    holders.setdefault(f"{node.module}:{alias.name}", set()).add(path.name)
    return holders


def test_every_name_that_is_used_is_watched() -> None:
    points = [*upstream.FIELDS, *upstream.ATTRIBUTES, *upstream.CONSTANTS, *upstream.NAMES]
    points += [*upstream.SIGNATURES, *upstream.SOURCES]
    watched = set()
    for point in points:
        module, _, path = point.partition(":")
        watched.add(id(upstream.resolve(f"{module}:{path.split('.')[0]}")))
    for name, files in held().items():
        value = upstream.resolve(name)
        is_module = isinstance(value, type(ast))
        assert is_module or name in points or id(value) in watched, (
            f"{name} ({files}) is not in titan_upstream_names.py"
        )


def extended() -> Iterator[tuple[type, ast.ClassDef]]:
    """Classes of whorl/titan, and their text, that have one of TorchTitan's above them."""
    for path in TITAN.rglob("*.py"):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        if path.name == "v030.py" or not nodes:
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        yield from ((getattr(module, node.name), node) for node in nodes)


def test_every_method_and_attribute_that_is_used_is_watched() -> None:
    """Of TorchTitan's classes by classes of ours: what is replaced, and what is read through self and super()."""
    watched = {(upstream.owner(p), p.rpartition(".")[2]) for p in (*upstream.SIGNATURES, *upstream.SOURCES)}
    attributes = {upstream.resolve(p): set(names.split()) for p, names in upstream.ATTRIBUTES.items()}
    count = 0
    for cls, node in extended():
        bases = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] == "torchtitan"]
        used = {a.attr for a in ast.walk(node) if isinstance(a, ast.Attribute) and ast.unparse(a.value) in OWN}
        set_here = {a.attr for a in ast.walk(node) if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store)}
        names = used | {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        methods = {n: next((b for b in bases if inspect.isfunction(vars(b).get(n))), None) for n in names}
        missing = {f"{base.__name__}.{n}" for n, base in methods.items() if base and (base, n) not in watched}
        read = {n for base in bases for n in (used - set_here) & upstream.set_on_self(base)}
        missing |= read - {n for base in bases for n in attributes.get(base, ())}
        assert not missing, f"{missing}, used by {cls.__name__}, are not in titan_upstream_names.py"
        count += len(read) + sum(base is not None for base in methods.values())
    assert count > 30  # so that a walk that finds nothing does not pass


def test_drift_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components import checkpoint
    from torchtitan.models.moe import moe

    def forward(self: Any, x: Any, extra: Any) -> Any:
        return x

    monkeypatch.setattr(moe.MoE, "forward", forward)
    monkeypatch.setattr(moe.MoE, "__init__", forward)
    monkeypatch.setattr(checkpoint, "MODEL", "weights")
    monkeypatch.setitem(upstream.FIELDS, "torchtitan.models.moe.moe:MoEArgs", "num_experts no_such_field")
    monkeypatch.setitem(upstream.ATTRIBUTES, "torchtitan.train:Trainer", "step no_such_attribute")
    monkeypatch.setattr(upstream, "NAMES", ["torchtitan.nothing:x", "torchtitan.train:no_such_name"])
    drift = "\n".join(upstream.drift())
    for expected in (
        "torchtitan.models.moe.moe:MoE.forward has changed",
        "torchtitan.models.moe.moe:MoE.__init__ has the signature (self, x, extra), expected (self, moe_args, ",
        "torchtitan.components.checkpoint:MODEL is 'weights', expected 'model'",
        "torchtitan.models.moe.moe:MoEArgs has no field no_such_field",
        "torchtitan.train:Trainer does not set no_such_attribute",
        "torchtitan.nothing:x does not exist: No module named 'torchtitan.nothing'",
        "torchtitan.train:no_such_name does not exist",
    ):
        assert expected in drift


def test_a_fingerprint_ignores_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "plain": "def f(x):\n    return x + 1\n",
        "commented": 'def f(x):\n    """Says\n    what."""\n\n    # why\n    return x + 1\n',
        "other": "def f(x):\n    return x + 2\n",
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    fingerprints = {}
    for name, text in texts.items():
        (tmp_path / f"printed_{name}.py").write_text(text)
        fingerprints[name] = upstream.fingerprint(upstream.resolve(f"printed_{name}:f"))
    assert fingerprints["plain"] == fingerprints["commented"] != fingerprints["other"]


# ---- CPU


def test_the_ledger_says_why() -> None:
    for shim in cpu.LEDGER:
        assert min(map(len, (shim.change, shim.why, shim.until))) > 15, shim
    document = (ROOT / "docs" / "training.md").read_text()
    assert all(shim.change.split()[0].rstrip(":") in document for shim in cpu.LEDGER), "the page lists the ledger"


def test_torchtitan_runs_on_the_host() -> None:
    from torchtitan.components import metrics
    from torchtitan.distributed import parallel_dims
    from torchtitan.tools import utils

    assert {utils.device_type, metrics.device_type, parallel_dims.device_type} == {"cpu"}
    assert utils.get_device_info() == ("cpu", utils.device_module)
    monitor = metrics.build_device_memory_monitor()
    assert 0 < monitor.get_peak_stats().max_reserved_gib < monitor.device_capacity_gib


def test_histc_counts_integers() -> None:
    ids = torch.randint(7, (50,))
    assert torch.equal(torch.histc(ids, bins=7, min=0, max=7), torch.bincount(ids, minlength=7))
    x = torch.rand(50)
    counted = torch.histc(x, bins=4, min=0, max=1)
    assert torch.equal(counted, torch.bincount((x * 4).long(), minlength=4).float())
    with pytest.raises(ValueError, match="bins 7, from 1 to 9"):
        torch.histc(ids, bins=7, min=1, max=9)


# ---- TorchTitan 0.3


def torchtitan_030() -> str | None:
    """A folder that has it: not what is installed here, since both cannot be."""
    folder = os.environ.get("TORCHTITAN_030")
    return folder if folder and (Path(folder) / "torchtitan").is_dir() else None


needs_030 = pytest.mark.skipif(
    torchtitan_030() is None, reason="TORCHTITAN_030 names no folder with TorchTitan 0.3 and its needs"
)


def python_030(*command: str, **environment: str) -> Any:
    """What Python prints last with TorchTitan 0.3 on its path, as JSON."""
    path = python_path(torchtitan_030())
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_030
def test_overrides_of_torchtitan_030() -> None:
    report = python_030(str(ROOT / "tests" / "titan" / "titan_v030.py"))
    assert report["version"].startswith("0.3")
    assert min(report["matched"].values()) >= 5, report
    # float32 in another order; the experts' products are rounded to bf16 in both
    assert max(report["errors"].values()) < 1e-6, report


@needs_030
def test_torchtitan_030_trains_with_overrides(tmp_path: Path) -> None:
    """Its own trainer and model on one CPU rank: the losses are those without."""
    store = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    code = "import sys, titan_v030_train; titan_v030_train.main(sys.argv[1:])"
    names = ("whorl_rms_norm", "whorl_rope", "whorl_gmm", "whorl_permute")
    overrides = [f"whorl.titan.v030.{name}" for name in names]
    plain, ours = (python_030("-c", code, *more, **store, DUMP_FOLDER=str(tmp_path)) for more in ([], overrides))
    assert not any("Whorl" in name for name in plain["modules"])
    assert {"WhorlRMSNorm", "WhorlComplexRoPE", "WhorlGroupedExperts"} <= set(ours["modules"])
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["losses"][-1] < ours["losses"][0]
