"""Whatever a model folder or file holds, what cannot be loaded is refused with a message and before memory is taken."""

import contextlib
import json
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoints
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models

from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.tokenizer import Tokenizer
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.models.qwen3_vl import Qwen3VL

gguf = pytest.importorskip("gguf")


def load(path: Path, **options: Any) -> Any:
    return weights.load_model(path, **{"device": "cpu", "dtype": "float32", "progress": False} | options)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"llama": Llama.tiny(), "moe": Qwen3.tiny(num_experts=4, norm_topk_prob=True)}
    return write_checkpoints(tmp_path_factory.mktemp("originals"), configs)


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return copy(originals["llama"], tmp_path / "llama")


@pytest.fixture
def sparse(originals: dict[str, Path], tmp_path: Path) -> Path:
    return copy(originals["moe"], tmp_path / "moe")


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- config.json


@pytest.mark.parametrize("text", ["[]", "null", "7", '"llama"', "[" * 100_000, "{", "\x00"])
def test_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (expected an object|cannot be read)"):
        load(folder)


WRONG: Any = ["2", 2.5, 0, -1, True, [2], {"a": 2}, 1e400]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim"],
)
def test_sizes_are_whole_numbers(folder: Path, name: str, value: Any) -> None:
    configure(folder, **{name: value})
    with pytest.raises(ValueError, match=f"config.json: {name} is .*expected a whole number, 1 or more"):
        load(folder)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many', expected a whole number"),
        ({"max_position_embeddings": 10**12}, "1000000000000 positions; give a max_length of at most"),
        ({"rope_theta": "big"}, "rope_theta is 'big', expected a number"),
        ({"rope_scaling": [1, 2]}, r"rope_scaling is \[1, 2\], expected an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2', expected a number"),
        ({"rope_scaling": {"rope_type": 7}}, "rope_type is 7, expected a name"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": None}},
            r"rope_type 'llama3' needs \['high_freq_factor'\]",
        ),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 1e308}},
            "original_max_position_embeddings is 1e\\+308, expected 2 to",
        ),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1}}, "_embeddings is 1, expected 2 to"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 2.0, 2.0, 0]}},
            r"long_factor is \[2.0, 2.0, 2.0, 0\], expected a list of numbers above 0",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures is LlamaForCausalLM; known are"),
        ({"architectures": [{}]}, r"known are .*LlamaForCausalLM"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and the files hold 21 tensors"),
    ],
)
def test_other_values(folder: Path, values: dict[str, Any], message: str) -> None:
    configure(folder, **values)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"num_experts": 10**9}, "num_experts is 1000000000, and the files hold"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most the number of experts, 4"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": "none"}, "mlp_only_layers is 'none'"),
        ({"use_sliding_window": True, "sliding_window": "all"}, "sliding_window is 'all'"),
    ],
)
def test_values_of_experts(sparse: Path, values: dict[str, Any], message: str) -> None:
    configure(sparse, **values)
    with pytest.raises(ValueError, match=message):
        load(sparse)


@pytest.mark.parametrize("value", [[1], "x", 2], ids=repr)
def test_sections_that_are_no_objects(value: Any) -> None:
    cases = {"vision_config": Qwen3VL.tiny(vision={"rope_parameters": value}), "deepseek": DeepSeek.tiny()}
    cases["deepseek"] |= {"rope_scaling": None, "rope_parameters": value}
    for config in cases.values():
        with pytest.raises(ValueError, match=r"rope_parameters is .*, expected an object with names and values"):
            weights.build(config, device="meta", dtype=torch.float32)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"])
def test_sizes_are_compared_before_memory_is_taken(folder: Path, name: str) -> None:
    """Terabytes of weights by config.json: the shapes of the files say otherwise."""
    configure(folder, **{name: 4 << 24, "head_dim": 8})
    with pytest.raises(ValueError, match="the tensors do not fit config"):
        load(folder)


@pytest.mark.filterwarnings("ignore::whorl.rope_config.UnknownFamilyWarning")
def test_any_value_of_any_type_gives_a_message(folder: Path, sparse: Path) -> None:
    rng = random.Random(1)
    strange = [None, True, 0, -3, 1.5, 10**30, "x", "", [], [1], {}, {"a": 1}, [[]], float("nan"), float("inf")]
    for path in (folder, sparse):
        plain = json.loads((path / "config.json").read_text())
        names = [*plain, "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "torch_dtype", "sliding_window"]
        for _ in range(150):
            (path / "config.json").write_text(json.dumps(plain | {rng.choice(names): rng.choice(strange)}))
            with contextlib.suppress(ValueError):  # anything else is what is looked for
                load(path, dtype=None)


# ---- safetensors


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {"a": 1}}, [], None])
def test_an_index_without_a_map(folder: Path, index: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: (weight_map is .*expected the file|expected an object)"):
        load(folder)


@pytest.mark.parametrize("name", ["", "a" * 5000, ".", "x/y"])
def test_an_index_that_names_no_file(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match=r"is not a file of this folder|is missing, which holds lm_head\.weight"):
        load(folder)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: Any = [[], [1], 7, "x", None, {"a": []}, {"a": 1}, {"a": ENTRY | {"data_offsets": [0]}}]
HEADERS += [{"a": ENTRY | {"data_offsets": offsets}} for offsets in ("2", None, {}, [0, "8"], [0, 1 << 60], [8, 0])]
HEADERS += [{"a": ENTRY | {"shape": shape}} for shape in ("", None, [1 << 62], [-2])]
HEADERS += [{"__metadata__": 5, "a": ENTRY}, {"a": ENTRY | {"dtype": 5}}]


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_headers_of_an_attacker(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(
        ValueError, match=r"model\.safetensors: (not a readable safetensors file|truncated, which cuts a)"
    ):
        load(folder)


def test_damaged_bytes_give_a_message(folder: Path) -> None:
    path, rng = folder / "model.safetensors", random.Random(2)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(400)] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            load(folder)


# ---- tokenizer and generation_config


@pytest.fixture
def words(tmp_path: Path) -> Path:
    Backend(tokenizer_models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("generation_config", {"eos_token_id": "end"}, "eos_token_id is 'end', expected an id"),
        ("generation_config", {"eos_token_id": [1, None]}, "expected an id or a list of ids"),
        ("generation_config", {"do_sample": True, "temperature": "hot"}, "temperature is 'hot', expected a number"),
        ("generation_config", [], "generation_config.json: expected an object"),
        ("tokenizer_config", [1], "tokenizer_config.json: expected an object"),
        ("tokenizer_config", {"eos_token": 5}, "eos_token is 5, expected a token's text"),
        ("tokenizer_config", {"eos_token": {"lstrip": False}}, "expected a token's text"),
        ("tokenizer_config", {"chat_template": 5}, "chat_template is neither a text nor a list of named texts"),
        ("tokenizer_config", {"chat_template": [{"name": "x"}]}, "chat_template is neither"),
        ("config", {"eos_token_id": {}}, "config.json: eos_token_id is {}"),
    ],
)
def test_files_beside_the_tokenizer(words: Path, file: str, values: Any, message: str) -> None:
    (words / f"{file}.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(words)


def test_files_that_are_not_utf_8(words: Path) -> None:
    (words / "generation_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: not JSON"):
        Tokenizer.from_path(words)


# ---- GGUF


def write_gguf(path: Path, **keys: Any) -> Path:
    """A tiny Llama; a key replaces or adds one of the metadata, None leaves it out."""
    values: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        if value is not None:
            add = {int: writer.add_int64, str: writer.add_string, float: writer.add_float32, list: writer.add_array}
            add[type(value)](name, value)
    shapes = {"token_embd": (3, 32), "output_norm": (32,), "output": (3, 32)}
    shapes |= {f"blk.0.attn_{n}": (32, 32) for n in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


def test_the_file_that_is_damaged_below_loads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    assert load(path).config.num_attention_heads == 4
    assert Tokenizer.from_path(path).encode("ab") == [2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general__architecture": ["llama"]}, r"architecture is \['llama'\]; known are"),
        ({"general__alignment": "wide"}, "general.alignment is 'wide'"),
        (
            {"llama__attention__head_count": [4, 4]},
            r"llama.attention.head_count is \[4, 4\], expected one whole number",
        ),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"llama__block_count": "one"}, "block_count is one"),
        ({"llama__block_count": 10**9}, "num_hidden_layers is 1000000000, and the files hold 12 tensors"),
        ({"llama__embedding_length": 0}, "embedding_length is 0"),
        ({"llama__embedding_length": 1 << 20}, "the tensors do not fit"),
        ({"llama__embedding_length": 1 << 39}, "the sizes make no model: .*overflow"),
        ({"llama__context_length": 10**15}, "1000000000000000 positions"),
        ({"llama__rope__freq_base": "high"}, "rope_theta is 'high'"),
    ],
)
def test_gguf_metadata(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", **keys)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_gguf_alignment_of_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", general__odd=1)
    data = path.read_bytes()
    # The writer itself divides by it, so another key is turned into it afterwards.
    key = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<IQ", 10, 0)
    old = struct.pack("<Q", 11) + b"general.odd" + struct.pack("<Iq", 11, 1)
    assert old in data
    path.write_bytes(data.replace(old, key))
    with pytest.raises(ValueError, match=r"general\.alignment is 0, expected a number of bytes, 1 or more"):
        load(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer__ggml__eos_token_id": 9}, r"special token ids \[9\] are outside the vocabulary of 3"),
        ({"tokenizer__ggml__padding_token_id": 9}, r"ids \[9\] are outside"),
        ({"tokenizer__ggml__bos_token_id": -1}, r"ids \[-1\] are outside"),
        ({"tokenizer__ggml__bos_token_id": "a"}, r"ids \['a'\] are outside"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "3 tokens and 2 types of tokens"),
        ({"tokenizer__ggml__tokens": [1, 2, 3]}, "tokenizer.ggml.tokens is not a list of str"),
        ({"tokenizer__ggml__merges": "a b"}, "tokenizer.ggml.merges is not a list of str"),
        ({"tokenizer__ggml__merges": ["x y"]}, "the merges do not fit the vocabulary"),
        ({"tokenizer__ggml__model": ["gpt2"]}, r"tokenizer model \['gpt2'\] cannot be read"),
        ({"tokenizer__chat_template": 7}, "are not texts"),
    ],
)
def test_gguf_vocabulary(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", **keys)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(path)


def header(*keys: bytes, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(keys)) + b"".join(keys) + tensors + bytes(64)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(key("a", 9, nested(5000))), "arrays are nested more than 8 deep"),
        (header(key("a", 9, struct.pack("<IQ", 4, 1 << 60))), "values, and"),
        (header(key("a", 9, struct.pack("<IQ", 8, 1 << 60))), "values, and"),
        (header(key("a", 77, b"")), "value type 77 is unknown"),
        (header(num_tensors=1, tensors=struct.pack("<QI", 0, 1 << 31)), "has 2147483648 dims"),
        (header(num_tensors=1 << 60), "cut off or damaged"),
    ],
    ids=["nested", "many numbers", "many strings", "unknown type", "many dims", "many tensors"],
)
def test_gguf_headers_of_an_attacker(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("dims", "kind", "message"),
    [((0, 3), 0, r"is \[3, 0\], expected a whole number of F32 blocks"), ((31, 3), 2, "whole number of Q4_0 blocks"),
     ((32, 3), 999, "is of type 999, which the gguf package does not know")],
)  # fmt: skip
def test_gguf_tensors_of_an_attacker(tmp_path: Path, dims: tuple[int, ...], kind: int, message: str) -> None:
    tensor = struct.pack("<Q", 4) + b"odd." + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    path = tmp_path / "model.gguf"
    path.write_bytes(header(num_tensors=1, tensors=tensor + struct.pack("<IQ", kind, 0)))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_any_damaged_byte_of_a_gguf_gives_a_message(tmp_path: Path) -> None:
    path, rng = write_gguf(tmp_path / "model.gguf"), random.Random(3)
    whole = path.read_bytes()
    for read in (load, Tokenizer.from_path):
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 1, 4))):
                damaged[rng.randrange(4, 1800)] = rng.randrange(256)
            path.write_bytes(damaged)
            with contextlib.suppress(ValueError):
                read(path)  # type: ignore[operator]


# ---- where models are, and how long


@pytest.mark.parametrize("name", ["./nosuch", "../nosuch", "./a/b", "-x/y", ".hidden/name"])
def test_a_path_is_not_taken_for_an_id(name: str) -> None:
    with pytest.raises(ValueError, match="no such file or folder, and not a Hugging Face id"):
        weights.resolve(name)


def test_an_architecture_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    patterns: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        patterns.append(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"architectures is \['GPT2LMHeadModel'\]; known are"):
        weights.resolve("org/gpt2")
    assert patterns == [["config.json"]]


def test_an_architecture_is_refused_before_its_weights_are_looked_for(folder: Path) -> None:
    configure(folder, architectures=["GPT2LMHeadModel"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"known are .*LlamaForCausalLM"):
        load(folder)


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"org/name: .*No space left on device"):
        weights.resolve("org/name")


def test_longer_than_the_model_was_made_for(folder: Path) -> None:
    with pytest.raises(ValueError, match="sequences of 257 tokens are too long: the model was made for 256"):
        load(folder, max_model_len=257)
    with pytest.raises(ValueError, match="of 1000 tokens are too long"):
        LLM(folder, tokenizer=object(), device="cpu", max_model_len=1000)  # type: ignore[arg-type]
    assert load(folder, max_model_len=256).max_length == 256
    configure(folder, rope_scaling={"rope_type": "dynamic", "factor": 4.0})  # made to be stretched
    assert load(folder, max_model_len=1000).max_length == 1000
    configure(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256})
    assert load(folder, max_model_len=1024).max_length == 1024


def test_the_command_says_it_in_a_line(folder: Path) -> None:
    configure(folder, num_hidden_layers="2")
    command = [sys.executable, "-m", "whorl", "generate", str(folder), "--prompt", "a", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "num_hidden_layers is '2'" in done.stderr
    assert "Traceback" not in done.stderr


def test_memory_is_bounded_while_refusing(originals: dict[str, Path], tmp_path: Path) -> None:
    """Weights as config.json asks for them would take 200 TB."""
    folder = copy(originals["llama"], tmp_path / "huge")
    configure(folder, hidden_size=1 << 22, intermediate_size=1 << 24, vocab_size=1 << 24, head_dim=1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="the tensors do not fit config"):
        load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_an_empty_checkpoint(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "norm" in name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="16 missing"):
        load(folder)
