"""A tiny Qwen3-VL that has learned to name the squares in a picture, asked over HTTP: it must have seen them."""

import io
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from media_files import encoded
from PIL import Image
from serving import Served, prepared
from toy import PRETRAINED, TOY, image, picture, text
from typer.testing import CliRunner

from whorl.cli import app
from whorl.engine.settings import EngineSettings

ENGINE = EngineSettings(device="cpu", max_num_seqs=8, block_size=4, num_blocks=512)
UNSEEN = 1_000_000  # training draws from one generator, never from these


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with prepared(PRETRAINED, ENGINE) as running:
        yield running


def ask(served: Served, *parts: Any) -> str:
    body = {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "choices" in answer, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def named(served: Served, kinds: Sequence[tuple[str, str]], seed: int) -> list[str]:
    """What the server says of one picture of each kind, several at a time."""

    def one(index: int) -> str:
        return ask(served, image(picture(*kinds[index], seed=seed + index)), text(TOY.ONE))

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(one, range(len(kinds))))


def test_it_names_what_it_sees(served: Served) -> None:
    """Every number of every colour; a model that only guessed would have one of twelve right."""
    names = named(served, TOY.KINDS, seed=UNSEEN)
    right = [TOY.answer(*kind) for kind in TOY.KINDS]
    assert sum(a == b for a, b in zip(names, right, strict=True)) >= 11, names


def test_swapped_pictures_swap_the_answers(served: Served) -> None:
    """Both prompts have the same tokens, and one question's blocks are there when the other is asked."""
    assert served.llm.pool.use_prefix_cache
    pairs = [(("one", "red"), ("three", "blue")), (("two", "green"), ("one", "yellow"))]
    num_right = 0
    for seed, (left, right) in enumerate(pairs):
        shown = [image(picture(*kind, seed=UNSEEN + 500 + seed)) for kind in (left, right)]
        for order, kinds in ((shown, (left, right)), (shown[::-1], (right, left))):
            for question, kind in zip((TOY.FIRST, TOY.SECOND), kinds, strict=True):
                num_right += ask(served, *order, text(question)) == TOY.answer(*kind)
    assert num_right == 8
    assert served.llm.stats()["num_tokens_hit"] > 0


def test_a_large_picture_is_the_same_picture(served: Served) -> None:
    """Resized on its way in."""
    small = TOY.draw("two", "blue", random.Random(UNSEEN))
    large = small.resize((480, 480), Image.Resampling.NEAREST)
    assert ask(served, image(encoded(large)), text(TOY.ONE)) == "two blue squares"


@pytest.mark.slow
def test_the_terminal_sees(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(picture("three", "yellow", UNSEEN))
    arguments = ["generate", str(PRETRAINED), "--chat", "-p", TOY.ONE, "--image", str(file), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "three yellow squares"


def test_pictures_are_balanced_and_squares_apart() -> None:
    """What is asked is what is drawn: as many squares as are said, none of which touch."""
    for index, (number, colour) in enumerate(TOY.KINDS):
        drawn = Image.open(io.BytesIO(picture(number, colour, UNSEEN + index)))
        assert drawn.size == (TOY.SIDE, TOY.SIDE)
        assert _num_islands(drawn) == TOY.NUMBERS.index(number) + 1


def _num_islands(drawn: Image.Image) -> int:
    """Connected patches of pixels that are not paper."""
    rest = {
        (x, y)
        for x in range(drawn.width)
        for y in range(drawn.height)
        if max(colour := drawn.getpixel((x, y))) - min(colour) > 60  # type: ignore[arg-type, type-var]
    }
    count = 0
    while rest:
        count, edge = count + 1, [rest.pop()]
        while edge:
            x, y = edge.pop()
            near = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & rest
            rest -= near
            edge += near
    return count


@pytest.mark.slow
def test_it_learns_to_see(tmp_path: Path) -> None:
    """Trained here, on one core, saved as any checkpoint is, and served: 95 of 100 pictures that it has never seen."""
    torch.use_deterministic_algorithms(False)  # filling memory with NaN takes as long again
    TOY.train(tmp_path)
    with prepared(tmp_path, ENGINE) as running:
        kinds = [TOY.KINDS[index % len(TOY.KINDS)] for index in range(100)]
        names = named(running, kinds, seed=UNSEEN + 1000)
    assert sum(a == TOY.answer(*kind) for a, kind in zip(names, kinds, strict=True)) >= 95
