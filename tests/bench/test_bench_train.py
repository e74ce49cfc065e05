"""`whorl bench train`: rows learn the same; what it counts, refuses and survives."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("torchtitan")

from whorl.titan import cpu

cpu.install()

from whorl.bench import train, train_model, train_report  # noqa: E402  # after the device is chosen
from whorl.bench.options import TrainOptions  # noqa: E402
from whorl.bench.train_model import Shape, balance, ours  # noqa: E402
from whorl.cli import app  # noqa: E402
from whorl.plan.layout import Parallelism, PlanSettings  # noqa: E402
from whorl.plan.memory import GB, memory_of  # noqa: E402
from whorl.plan.model_shape import DEEPSEEK_V32  # noqa: E402
from whorl.titan.converters.table import CONVERTERS  # noqa: E402


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "train", "--device", "cpu", *arguments])


def settings_of(**options: Any) -> train.TrainSettings:
    return train.TrainSettings.resolve(TrainOptions(device="cpu", **({"layers": "2", "seq": "16"} | options)))


def shape(layers: int = 2, seq: int = 32) -> Shape:
    return Shape(layers=layers, seq=seq, tiny=True, device="cpu")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("train") / "found.json"
    rows = "small,fused,kernels,dsa+swap,dsa+swap8,dsa+checkpoint"
    sizes = ("--layers", "2", "--seq", "32", "--steps", "2", "--warmup", "1", "--ring", "4")
    result = run("--rows", rows, *sizes, "--peer", "transformers", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads(out.read_text())
    return printed


# ---- rows


def test_every_row_takes_the_same_steps(document: Any) -> None:
    rows = {row["row"]: row for row in document["rows"]}
    assert list(rows) == ["transformers", "small", "fused", "kernels", "dsa+swap", "dsa+swap8", "dsa+checkpoint"]
    mine = [row for name, row in rows.items() if name != "transformers"]
    for row in mine:
        assert row["loss"] == pytest.approx(mine[0]["loss"], rel=1e-5)
        assert row["indexer_kl"] == pytest.approx(mine[0]["indexer_kl"], rel=1e-3)
        assert row["tok_s"] == pytest.approx(32 / row["ms_per_step"] * 1e3)
        assert row["host_ms"] <= row["slowest_ms"]
    assert "indexer_kl" not in rows["transformers"]
    assert len({row["num_parameters"] for row in rows.values()}) == 1, "transformers' model is of another shape"
    fused, theirs = rows["fused"], rows["transformers"]
    assert f"fused {fused['tok_s'] / theirs['tok_s']:.2f}x" in train_report.render(document)


def test_rows_with_swapped_moments_say_what_they_move(document: Any) -> None:
    rows = {row["row"]: row for row in document["rows"]}
    exact, in_8_bits = rows["dsa+swap"], rows["dsa+swap8"]
    assert 8 <= exact["moved_bytes"] / exact["num_parameters"] < 8.01
    assert 2 < in_8_bits["moved_bytes"] / exact["num_parameters"] < 2.1
    assert exact["ring"] == in_8_bits["ring"] == document["header"]["ring"] == 4
    assert document["header"]["link_gb_s"] is None, "the CPU has no link"
    assert exact["backend"] == in_8_bits["backend"] == "torch"
    assert not any("moved_bytes" in rows[name] for name in ("transformers", "kernels", "dsa+checkpoint"))
    assert "4 buckets on the device; no link; moments of swap8 in int8" in train_report.render(document)


def test_rows_that_fail_say_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is out of memory is tried again with checkpointing."""

    def build(requested: Shape, switches: frozenset[str]) -> train_model.Trainee:
        if "gmm" in switches:
            raise RuntimeError("no such kernel\nmore")
        if "checkpoint" not in switches:
            raise torch.OutOfMemoryError
        return ours(requested, switches)

    monkeypatch.setattr(train, "ours", build)
    document = train.run(settings_of(rows="kernels,fused", steps=1, warmup=1))
    failed, first, second = document["rows"]
    assert failed["note"] == "did not run: RuntimeError: no such kernel"
    assert first["note"] == "out of memory"
    assert second["switches"] == ["checkpoint", "dsa"]
    assert second["tok_s"] > 0
    assert not train.is_good(document)


def test_what_a_converter_finds_wrong_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, module: Any) -> float:
        raise ValueError("whorl_gmm: 24 times")

    monkeypatch.setattr(CONVERTERS["whorl_gmm"], "_compare", refuse)
    monkeypatch.setattr(train_model, "verdicts", verdicts := dict[str, str]())
    monkeypatch.setattr(train, "verdicts", verdicts)
    settings = settings_of(rows="gmm,dsa", steps=1, warmup=1)
    document = train.run(settings)
    assert [row["wrong"] for row in document["rows"]] == [["whorl_gmm: 24 times"], []]
    text = train_report.render(document)
    assert "gmm !" in text
    assert "dsa !" not in text
    assert not train.is_good(document)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "fast"), "fast is neither a row"),
        (("--rows", "swap+swap8"), "swap and swap8 exclude each other"),
        (("--layers", "four"), "--layers is four, expected numbers such as"),
        (("--seq", "1"), "--seq is 1, expected"),
        (("--profile", "swap", "--rows", "small"), "--profile is swap, expected one of --rows small"),
        (("--rows", ""), "--rows is empty"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


# ---- what a step does


def test_balance_raises_the_bias_of_idle_experts() -> None:
    model = ours(shape(), frozenset()).model
    moe: Any = model.layers["1"].moe  # type: ignore[index, union-attr]
    moe.tokens_per_expert.copy_(torch.tensor([4.0, 0.0, 2.0, 2.0]))
    balance(model)
    assert moe.expert_bias.tolist() == pytest.approx([-1e-3, 1e-3, 0, 0])
    assert not moe.tokens_per_expert.any()


# ---- memory


def test_prediction_is_the_planners() -> None:
    """Which tests/doctor/test_train_plan.py holds to what was measured."""
    args = Shape(layers=8, seq=32768, tiny=False, device="cuda").args()
    trim = dataclasses.replace(DEEPSEEK_V32, layers=8, experts=8, chosen=2, dense=frozenset({0}))
    settings = PlanSettings(seq=32768, batch=1, weight=2, gradient=2, moment=2, chunk=512)
    planned = memory_of(trim, Parallelism(pp=1, tp=1, cp=1, dp=1, ep=1, swap=True), settings)
    bf16 = torch.bfloat16
    predicted = train.predict(args, 32768, train.switches_of("dsa+checkpoint+swap"), bf16)
    assert predicted == pytest.approx(planned.allocated * GB)
    for row in ("dsa+checkpoint", "dsa+swap", "checkpoint+swap"):  # each of them less by one
        assert train.predict(args, 32768, train.switches_of(row), bf16) > predicted
    longer = train.predict(args, 32768, train.switches_of("dsa+checkpoint+swap"), bf16, ring=5)
    assert longer - predicted == pytest.approx(2 * 2 * 2**25 * 2)
    in_8_bits = train.predict(args, 32768, train.switches_of("dsa+checkpoint+swap8"), bf16)
    assert predicted - in_8_bits == pytest.approx(3 * 2 * 2**25 * (2 - 1 - 4 / 256))
