"""The engine with a vision model, for tests that compare it with transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mock_model import record
from vision import save

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.media import MediaItem

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Prompt = tuple[list[int], list[MediaItem]]


def pair(config: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """transformers' model and ours, of one checkpoint."""
    theirs = save(folder, config)
    # transformers writes what it made of the values; a publisher's file leaves out what its classes fill in
    (folder / "config.json").write_text(json.dumps(config))
    return theirs, load_model(folder, device="cpu", progress=False)


def serve(model: Any, prompts: Sequence[Prompt], **options: Any) -> tuple[LLM, list[Any], dict[int, Any]]:
    """The engine, the sequences of the prompts, and the logits of their tokens."""
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "block_size": 4, "num_blocks": 300}
    llm = LLM(model=model, **settings | options)
    logits = record(llm)
    sequences = [llm.add(ids, GREEDY, media=media)[0] for ids, media in prompts]
    while llm.has_work:
        llm.step()
    return llm, sequences, logits
