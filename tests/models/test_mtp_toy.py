"""A target and its layer of multi-token prediction, trained together on text: drafts are accepted, steps are fewer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whorl.cli import app
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.mtp import MTP


@pytest.mark.slow
def test_what_was_trained_together_drafts(tmp_path: Path) -> None:
    """By `whorl bench decode --classify`, whose last columns say how much faster it was: no clock decides here. The
    number of steps does, and plain decoding's tokens."""
    pytest.importorskip("transformers")
    pytest.importorskip("torchtitan")
    import mtp_toy

    losses = mtp_toy.train(tmp_path, 220)
    assert max(losses) < 0.1, "neither has learnt its text"
    arguments = ["bench", "decode", str(tmp_path), "--classify", "--speculate", "mtp", "--draft-fixed", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--tokens", "64", "--repeats", "1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout)["classes"]:
        assert row["outputs"] == {"OK": row["runs"]}
        assert row["acceptance"] > 0.5
        assert row["ok"]["times"] > 0
    prompt, answer = next(iter(mtp_toy.PROMPTS.values()))[0], mtp_toy.answers(1)[0]
    params, steps = SamplingParams(temperature=0, max_tokens=60), []
    for proposer in (None, MTP(k=1)):
        llm = LLM(tmp_path, device="cpu", num_blocks=32, speculate=proposer, draft_length="fixed")
        (output,) = llm.generate([f"{prompt} "], params, progress=False)
        assert output.text == answer[:60]
        steps.append(llm.num_steps)
    assert steps[1] < 0.67 * steps[0]
