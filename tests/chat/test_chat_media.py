"""Pictures and videos in the terminal: `whorl generate --image`, `/image` in a chat, and what is said without them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from media_files import OPTIONS, film, png, write_model_files
from seeing import Looking, looking, seeing_tokenizer
from typer.testing import CliRunner

from whorl.chat import command
from whorl.chat.attachments import Attachments
from whorl.chat.conversation import Conversation
from whorl.chat.loop import Chat
from whorl.chat.terminal import Screen
from whorl.cli import app
from whorl.engine.sequence import SamplingParams
from whorl.media import Processor

GREEDY = SamplingParams(temperature=0, max_tokens=24)
ANSWERS = {"what": "a cat", "and this": "a dog", "why": "so"}
IMAGE_PAD, VIDEO_PAD = (seeing_tokenizer().token_id(f"<|{kind}_pad|>") for kind in ("image", "video"))


@pytest.fixture(scope="module")
def processor() -> Iterator[Processor]:
    made = Processor(OPTIONS, num_processes=1)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(png(64 + 32 * seed, 64, seed))
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "film.webm").write_bytes(film())
    (tmp_path / "frames").mkdir()
    for index in range(4):
        (tmp_path / "frames" / f"{index:03}.png").write_bytes(png(64, 64, index))
    return tmp_path


def talk(llm: Looking, processor: Processor, *lines: str, **options: Any) -> str:
    screen, told = Screen(io.StringIO()), iter(lines)

    def read(prompt: str) -> str:
        for line in told:
            return line
        raise EOFError

    attachments = Attachments(None, processor)
    assert Chat(Conversation(llm, **options), GREEDY, screen=screen, read=read, attachments=attachments).run() == 0
    return screen.out.getvalue()  # type: ignore[attr-defined]


def test_a_picture_goes_with_the_next_message(processor: Processor, files: Path) -> None:
    """And stays in the conversation: later turns have it in its place, and go on from the same ids."""
    llm = looking(ANSWERS)
    lines = (f"/image {files}/0.png", "\nwhat", f"/image {files}/1.png", f"/image {files}/2.png", "\nand this", "why")
    shown = talk(llm, processor, *lines)
    assert "(0.png, 4 tokens, goes with the next message)" in shown
    assert shown.replace("\n", " ").endswith("a dog so ")
    (first, one), (second, three), (third, still) = llm.seen
    assert [len(one), len(three), len(still)] == [1, 3, 3]
    assert [ids.count(IMAGE_PAD) for ids in (first, second, third)] == [4, 18, 18]
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [item.grid for item in three] == [(1, 4, 4), (1, 4, 6), (1, 4, 8)]
    assert three[0].digest == one[0].digest


def test_a_video_and_a_folder_of_frames(processor: Processor, files: Path) -> None:
    llm = looking(ANSWERS)
    talk(llm, processor, f"/video {files}/film.webm", f"/video {files}/frames", "\nwhat")
    ids, items = llm.seen[0]
    assert [item.grid[0] for item in items] == [3, 2]
    assert ids.count(VIDEO_PAD) == sum(len(item.patches) // 4 for item in items)


def test_forgetting_forgets_pictures(processor: Processor, files: Path) -> None:
    llm = looking(ANSWERS)
    talk(llm, processor, f"/image {files}/0.png", "\nwhat", f"/image {files}/1.png", "/reset", "why")
    assert [len(items) for _, items in llm.seen] == [1, 0]
    llm = looking(ANSWERS)
    talk(llm, processor, f"/image {files}/0.png", "\nwhat", "why", has_memory=False)
    assert [len(items) for _, items in llm.seen] == [1, 0]


def test_what_cannot_be_attached(processor: Processor, files: Path) -> None:
    llm = looking(ANSWERS)
    shown = talk(
        llm, processor, "/image", f"/image {files}/none.png", f"/image {files}/broken.png", f"/image {files}", "why"
    )
    assert "/image: expected a file name" in shown
    assert "none.png: cannot be read: No such file" in shown
    assert "broken.png: it is not a PNG, JPEG, WebP or GIF picture" in shown
    assert "cannot be read: Is a directory" in shown
    assert [len(items) for _, items in llm.seen] == [0]
    assert "needs a chat template" in talk(looking(), processor, f"/image {files}/0.png", is_chat=False)


def test_a_saved_conversation_names_its_pictures(processor: Processor, files: Path) -> None:
    talk(
        looking(ANSWERS), processor, f"/image {files}/0.png", "\nwhat", f"/save {files}/a.txt", f"/save {files}/a.json"
    )
    assert (files / "a.txt").read_text().startswith("user:\n[image 0.png]\n\nwhat")
    saved = json.loads((files / "a.json").read_text())
    assert saved[0]["content"][0] == {"type": "image", "name": "0.png"}


# ---- commands


def test_generate_takes_pictures(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_files(files)
    llm = looking(ANSWERS)
    monkeypatch.setattr(command, "load", lambda options: llm)
    words = ["generate", str(files), "--chat", "-p", "\nwhat", "--image", f"{files}/0.png", "--image", f"{files}/1.png"]
    done = CliRunner().invoke(app, [*words, "--video", f"{files}/film.webm", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["text"] == "a cat"
    ids, items = llm.seen[0]
    assert [item.kind for item in items] == ["image", "image", "video"]
    assert answer["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("-p hi --image {0}/0.png", "--image and --video need the chat template: add --chat"),
        ("--chat -p hi --image {0}/none.png", "none.png: cannot be read"),
        ("--chat -p hi --image {0}/broken.png", "broken.png: it is not a PNG"),
    ],
)
def test_generate_refuses_before_loading(files: Path, monkeypatch: pytest.MonkeyPatch, extra: str, says: str) -> None:
    write_model_files(files)
    monkeypatch.setattr(command, "load", lambda options: pytest.fail("loaded"))
    done = CliRunner().invoke(app, ["generate", str(files), *extra.format(files).split()])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_a_model_of_text(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setattr(command, "load", lambda options: pytest.fail("loaded"))
    done = CliRunner().invoke(app, ["generate", str(files), "--chat", "-p", "hi", "--image", f"{files}/0.png"])
    assert done.exit_code == 2
    assert "takes text only, no pictures and no videos" in " ".join(done.output.split())
