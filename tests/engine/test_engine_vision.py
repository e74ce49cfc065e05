"""Pictures in the engine: what may not change a bit, what is encoded how often, what is kept, what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mock_model import Logits, MockModel, record
from vision import END, IMAGE, START, expand, item

from whorl.engine.encoder import Encoder, Job
from whorl.engine.features import Features
from whorl.engine.llm import LLM
from whorl.engine.placing import PlacedMedia, Placement
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import random_model
from whorl.media import MediaItem
from whorl.models.qwen3_vl import Qwen3VL

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
TEXT = [5, 81, 2, 44, 13, 7, 60, 9]
CAT, DOG, STRIP = item(0, (1, 4, 6)), item(1, (1, 4, 6)), item(2, (1, 2, 16))
CLIP = item(3, (3, 4, 4), "video")
PROMPTS: list[list[Any]] = [
    [*TEXT, CAT, 3, 4, DOG, 8],
    [*TEXT, DOG, 3, 4, CAT, 8],
    [*TEXT, CAT, 3, 4, CAT, *TEXT],
    [CLIP, 7, STRIP, 9],
    TEXT * 3,
    [*TEXT, CAT, 3, 4, CAT, *TEXT[:4]],
]
EXPANDED = [expand(parts) for parts in PROMPTS]
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "block_size": 4, "num_blocks": 160}


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(num_experts=4) if request.param == "experts" else tiny()


def tiny(**changes: Any) -> Any:
    """Random weights, with attention and features that matter."""
    model: Any = random_model(Qwen3VL.tiny(**changes), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name:
                parameter.fill_(2)
        model.decoder.embed_tokens.weight.mul_(4)
    return model


def run(llm: LLM, prompts: Sequence[tuple[list[int], list[MediaItem]]], params: SamplingParams = GREEDY) -> list[Any]:
    """Sequences, added one a step, so that they meet in the middle."""
    sequences = []
    for ids, media in prompts:
        sequences += llm.add(ids, params, media=media)
        llm.step()
    while llm.has_work:
        llm.step()
    return sequences


def served(model: Any, prompts: Any, **options: Any) -> tuple[LLM, list[Any], list[Logits]]:
    llm = LLM(model=model, **SETTINGS | options)
    logits = record(llm)
    sequences = run(llm, prompts)
    return llm, sequences, [logits[seq.id] for seq in sequences]


@pytest.fixture(scope="module")
def alone(model: Any) -> list[tuple[list[int], Logits]]:
    """Each by itself, its prompt in one piece."""
    outputs = []
    for prompt in EXPANDED:
        _, (seq,), (logits,) = served(model, [prompt], use_prefix_cache=False, max_prompt_tokens=2048)
        outputs.append((seq.output_ids, logits))
    return outputs


def check(result: tuple[LLM, list[Any], list[Logits]], alone: Any) -> dict[str, int]:
    llm, sequences, logits = result
    for seq, mine, (output, expected) in zip(sequences, logits, alone, strict=True):
        assert seq.output_ids == output
        assert mine.keys() >= expected.keys()
        assert all(torch.equal(mine[place], expected[place]) for place in expected)
    assert llm.encoder is not None
    assert not any(entry.holders for entry in llm.encoder._entries.values()), "a finished sequence holds a picture"
    assert llm.pool.num_used == 0
    return llm.stats()


WAYS: dict[str, dict[str, Any]] = {
    "together": {"use_prefix_cache": False, "max_prompt_tokens": 2048},
    "in chunks": {"use_prefix_cache": False, "max_prompt_tokens": 5},
    "a token at a time": {"max_prompt_tokens": 1},
    "with the prefix cache": {"max_prompt_tokens": 16},
    "crowded": {"num_blocks": 20, "max_model_len": 72, "max_prompt_tokens": 7},
    "running ahead": {"run_ahead": True, "max_prompt_tokens": 9},
    "one picture is kept": {"encoder_cache": 12, "max_prompt_tokens": 6, "use_prefix_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_the_way(model: Any, alone: Any, way: str) -> None:
    stats = check(served(model, EXPANDED, **WAYS[way]), alone)
    if way == "crowded":
        assert stats["num_preemptions"] > 0
    if way in ("a token at a time", "with the prefix cache"):
        assert stats["num_tokens_hit"] > 0
    if way == "one picture is kept":
        assert stats["num_encoded"] > 4
        assert stats["num_encoder_tokens"] <= 12
    if way == "together":
        assert stats["num_encoded"] == 4
        assert stats["num_encoder_hits"] == 6


def test_bits_do_not_depend_on_prompt_lookup(model: Any, alone: Any) -> None:
    lookup = PromptLookup(k=5, min_hist=1, guard=False)
    stats = check(served(model, EXPANDED, speculate=lookup, draft_length="fixed", max_prompt_tokens=8), alone)
    assert stats["num_drafted"] > 0


def test_copies_share_a_prompt_and_its_pictures(model: Any, alone: Any) -> None:
    for use_prefix_cache in (True, False):
        llm = LLM(model=model, **SETTINGS, use_prefix_cache=use_prefix_cache)
        logits = record(llm)
        sequences = run(llm, EXPANDED[:1], replace(GREEDY, n=3))
        assert len(sequences) == 3
        for seq in sequences:
            assert torch.equal(logits[seq.id][0], alone[0][1][0])
        assert llm.stats()["num_encoded"] == 2


# ---- the prefix cache


def test_two_pictures_of_one_size_are_not_taken_for_each_other(model: Any, alone: Any) -> None:
    """The same ids: only digests tell the prompts apart, and each finds its own blocks."""
    assert EXPANDED[0][0] == EXPANDED[1][0]
    assert not torch.equal(alone[0][1][0], alone[1][1][0])
    twice = [*EXPANDED[:2], *EXPANDED[:2]]
    llm = LLM(model=model, **SETTINGS)
    logits = record(llm)
    sequences = [run(llm, [prompt])[0] for prompt in twice]
    cached = [seq.num_cached for seq in sequences]
    length = len(EXPANDED[0][0])
    assert cached == [0, 8, (length - 1) // 4 * 4, (length - 1) // 4 * 4]
    for seq, (_, expected) in zip(sequences, [*alone[:2], *alone[:2]], strict=True):
        assert torch.equal(logits[seq.id][0], expected[0])
    assert llm.stats()["num_encoded"] == 2


def test_a_prefix_may_end_inside_a_picture(model: Any, alone: Any) -> None:
    """The rest of it needs features, and no more than it needs is encoded."""
    ids, media = EXPANDED[0]
    llm = LLM(model=model, **SETTINGS, max_prompt_tokens=3)
    logits = record(llm)
    (first,) = llm.add(ids, GREEDY, media=media)
    while first.num_computed < 12:
        llm.step()
    assert 9 < first.num_computed < 15  # its features are at 9 to 14
    llm.abort(first)
    assert llm.encoder is not None
    assert not any(entry.holders for entry in llm.encoder._entries.values())
    (seq,) = run(llm, EXPANDED[:1])
    assert seq.num_cached == 12
    assert all(torch.equal(row, logits[seq.id][place]) for place, row in alone[0][1].items())


def test_salts_share_no_picture(model: Any) -> None:
    llm = LLM(model=model, **SETTINGS)
    for salt in ("a", "b", "a", None):
        run(llm, EXPANDED[:1], replace(GREEDY, cache_salt=salt))
    assert llm.stats()["num_encoded"] == 3 * 2


# ---- the encoder


def test_the_tower_runs_once_for_a_picture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = model.tower.begin
    monkeypatch.setattr(model.tower, "begin", lambda *args: begun.append(args) or begin(*args))
    llm, *_ = served(model, [EXPANDED[0], EXPANDED[1], EXPANDED[0]], use_prefix_cache=False)
    assert len(begun) == llm.stats()["num_encoded"] == 2


def test_a_large_picture_does_not_hold_up_decoding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 tokens, where a step takes 4: one of four layers a step, then 4 features; a token is decoded in each."""
    ran = []
    advance = model.tower.advance
    monkeypatch.setattr(model.tower, "advance", lambda e, layers: ran.append(layers) or advance(e, layers))
    llm = LLM(model=model, **SETTINGS, max_prompt_tokens=4)
    (busy,) = llm.add(TEXT, replace(GREEDY, max_tokens=40))
    while busy.num_outputs < 2:
        llm.step()
    ids, media = expand([item(9, (1, 8, 16)), 3])
    (seq,) = llm.add(ids, GREEDY, media=media)
    steps = 0
    while not seq.num_outputs:
        before = busy.num_outputs
        llm.step()
        steps += 1
        assert busy.num_outputs == before + 1
    assert ran == [1, 1, 1, 1]
    assert steps >= 4 + len(ids) // 4
    run(llm, [])


def encoded(model: Any, jobs: list[Job], device: str) -> dict[int, torch.Tensor]:
    features = Features(model.tower, device)
    features.run(jobs)
    return features._done


def jobs_of(model: Any, grids: Sequence[tuple[int, int, int]]) -> list[Job]:
    items = [item(i, grid, values=model.config.vision.patch_values) for i, grid in enumerate(grids)]
    return [Job(number=i, layers=model.config.vision.depth, item=each) for i, each in enumerate(items)]


def test_pictures_of_a_step_run_as_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that leaves their bits: up to so many patches at once; on a CPU one after the other."""
    ran = []
    advance = model.tower.advance
    monkeypatch.setattr(model.tower, "advance", lambda e, layers: ran.append(e.num_patches) or advance(e, layers))
    jobs = jobs_of(model, [(1, 4, 6), (1, 2, 2), (2, 4, 4), (1, 8, 8)])
    alone = encoded(model, jobs, "cpu")
    assert ran == [24, 4, 32, 64]
    ran.clear()
    monkeypatch.setattr("whorl.engine.features.runs_several", lambda device: True)
    monkeypatch.setattr("whorl.engine.features.MOST_PATCHES", 64)
    together = encoded(model, jobs, "cpu")
    assert ran == [60, 64]
    for number, features in alone.items():
        torch.testing.assert_close(together[number], features, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_pictures_that_run_as_one_have_their_own_bits() -> None:
    """Heads of 72 channels, as published, and sizes that fill no tile."""
    vision = {"hidden_size": 288, "num_heads": 4, "intermediate_size": 600, "depth": 2, "deepstack_visual_indexes": [0]}
    config = Qwen3VL.tiny()
    config["vision_config"] |= vision
    model = random_model(config, device="cuda", dtype=torch.bfloat16, max_length=256)
    jobs = jobs_of(model, [(1, 14, 6), (1, 2, 2), (2, 14, 14), (1, 34, 18), (1, 64, 64)])
    together = encoded(model, jobs, "cuda")
    for job in jobs:
        assert torch.equal(encoded(model, [job], "cuda")[job.number], together[job.number])


def sequence(*items: PlacedMedia, length: int = 40, salt: str | None = None) -> Seq:
    axes = np.tile(np.arange(length), (3, 1))
    params = SamplingParams(cache_salt=salt)
    return Seq([1] * length, params, max_len=99, placement=Placement(items, axes, 0))


def placed(seed: int, start: int, num_tokens: int) -> PlacedMedia:
    return PlacedMedia(item(seed, (1, 2, 2 * num_tokens)), (range(start, start + num_tokens),))


def test_the_encoder_counts_its_work() -> None:
    encoder = Encoder(depth=10, most=100)
    seq = sequence(placed(0, 4, 20))
    assert encoder.plan(seq, 3) == (3, 0)  # not there yet
    assert encoder.take().jobs == []
    assert encoder.plan(seq, 14) == (4, 10)  # ten tokens are half of its layers
    work = encoder.take()
    assert [(job.layers, job.item is not None) for job in work.jobs] == [(5, True)]
    assert work.num_tokens == 10
    seq.num_computed = 4
    assert encoder.plan(seq, 16) == (6, 10)  # the other half, and some of its features
    assert [(job.layers, job.item) for job in encoder.take().jobs] == [(5, None)]
    seq.num_computed = 10
    assert encoder.plan(seq, 16) == (16, 0)
    encoder.passed(seq)
    assert encoder._entries[next(iter(encoder._entries))].holders == {seq.id}
    seq.num_computed = 24
    encoder.passed(seq)
    assert not encoder._entries[next(iter(encoder._entries))].holders


def test_images_in_one_piece_of_the_grid_are_held_together() -> None:
    """A chunk that may end only there cannot release the first before it has the second."""
    for grid, reached in ((1, 22), (32, 99 - 20 - 15)):
        encoder = Encoder(depth=2, most=30, grid=grid)
        seq, other = sequence(placed(0, 1, 20), placed(1, 22, 15)), sequence(placed(2, 3, 25))
        assert encoder.plan(seq, 99)[0] == reached
        assert encoder.plan(other, 99)[0] == 3, "it holds nothing, so it waits"


def test_the_encoder_drops_what_nobody_needs() -> None:
    encoder = Encoder(depth=2, most=50)
    first, second, third = (sequence(placed(i, 0, 20)) for i in range(3))
    for seq in (first, second):
        encoder.plan(seq, 99)
    assert encoder.plan(third, 99) == (0, 0)  # two are held: there is no room
    assert encoder.take().dropped == []
    encoder.release(second)
    encoder.release(first)
    assert encoder.plan(sequence(placed(0, 0, 20)), 99) == (99, 0)  # still there, and now the last one used
    assert encoder.plan(third, 99) == (79, 20)
    assert encoder.take().dropped == [1]
    assert (encoder.num_encoded, encoder.num_hit, encoder.num_held) == (3, 1, 40)


def test_a_picture_that_is_shown_twice_is_held_until_the_second_is_through() -> None:
    encoder = Encoder(depth=2, most=20)
    seq = sequence(placed(0, 0, 10), placed(0, 15, 10))
    assert encoder.plan(seq, 50) == (40, 10)
    seq.num_computed = 12
    encoder.passed(seq)
    other = sequence(placed(1, 0, 20))
    assert encoder.plan(other, 50) == (0, 0)
    seq.num_computed = 30
    encoder.passed(seq)
    assert encoder.plan(other, 50) == (30, 20)


# ---- what is refused


IDS, SHOWN = EXPANDED[0]
WRONG: dict[str, tuple[list[int], list[MediaItem]]] = {
    "2 images or videos have 12 features, and the prompt has 18 placeholder tokens; the first .* is token 28": (
        [*IDS, START, *[IMAGE] * 6, END],
        SHOWN,
    ),
    "item 2 .image, grid 1x4x6.: expected 1 runs of 6 .* has no placeholders left": (IDS, [*SHOWN, CAT]),
    "0 images or videos have 0 features, and the prompt has 12": (IDS, []),
    "item 0 .* has 6 tokens 101 from 9 on": (IDS, [item(5, (1, 4, 8)), DOG]),
    "item 0 .video.* 2 runs of 6 placeholder tokens 102": (IDS, [item(5, (2, 4, 6), "video"), DOG]),
    "item 0 .image, grid 1x3x8.: expected": (IDS, [replace(CAT, grid=(1, 3, 8)), DOG]),
    "item 1 .* patches are .24, 96. float64": (IDS, [CAT, replace(DOG, patches=DOG.patches.astype(np.float64))]),
    "item 1 .* patches are .23, 96. float32": (IDS, [CAT, replace(DOG, patches=DOG.patches[1:])]),
    "expected 16 bytes or more": (IDS, [CAT, replace(DOG, digest=b"short")]),
    "item 1 .* has 32 tokens, expected at most 30": expand([CAT, item(5, (1, 8, 16))]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_go_together_is_refused(model: Any, message: str) -> None:
    llm = LLM(model=model, **SETTINGS, encoder_cache=30)
    ids, media = WRONG[message]
    with pytest.raises(ValueError, match=message):
        llm.add(ids, GREEDY, media=media)
    assert not llm.has_work


def test_media_for_a_model_of_text_is_refused() -> None:
    llm = LLM(model=MockModel(), device="cpu", num_blocks=8)
    with pytest.raises(ValueError, match="2 images or videos, expected none, because this model reads text only"):
        llm.add(*EXPANDED[0][:1], media=EXPANDED[0][1])
    with pytest.raises(ValueError, match="1 prompts and 2 lists of media; pass one list for each prompt"):
        llm.generate([[1, 2, 3]], media=[[], []], progress=False)
    assert not llm.has_work


def test_generate_takes_media_of_each_prompt(model: Any, alone: Any) -> None:
    llm = LLM(model=model, **SETTINGS)
    outputs = llm.generate([ids for ids, _ in EXPANDED], GREEDY, media=[media for _, media in EXPANDED], progress=False)
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in alone]
    plain = llm.generate([TEXT * 3], GREEDY, progress=False)
    assert plain[0].token_ids == alone[4][0]
