"""Checks of tensor parallelism: how heads split over ranks, and the collectives' algorithm."""

from collections.abc import Iterator

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import rule


@rule("kv-heads-tp", at="tensor_parallel")
def heads_do_not_split(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    ranks, text = launch.number("tensor_parallel"), launch.text or {}
    heads = launch.number("num_attention_heads") or text.get("num_attention_heads")
    groups = launch.number("num_query_groups") or text.get("num_key_value_heads") or heads
    if ranks is None or not isinstance(heads, int) or not isinstance(groups, int):
        return
    if launch.is_mla:
        groups = 1  # one latent key for all heads, replicated on every rank
    valid_sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if ranks not in valid_sizes:
        yield Finding(
            found=f"{heads} query heads over {ranks} ranks"
            if launch.is_mla
            else f"{heads} query and {groups} key/value heads over {ranks} ranks",
            expected=f"one of {valid_sizes}",
            why="Each rank needs whole heads: query heads must divide evenly, and key/value heads must be split evenly "
            "or each be replicated on the same number of ranks. Otherwise the framework refuses to start.",
            fix=f"tensor parallel size {max((n for n in valid_sizes if n <= ranks), default=1)}",
        )


@rule("hccl-algorithm", "warning")
def fullmesh_reported_wrong(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    algorithm = launch.environment("HCCL_ALGO")
    if algorithm is not None and "fullmesh" in str(algorithm.value).lower():
        yield Finding(
            where=f"{algorithm.where} (HCCL_ALGO)",
            found=f"HCCL_ALGO={algorithm.value}",
            expected="HCCL_ALGO=level0:ring",
            why="Users report garbled output of tensor-parallel all-reduce with fullmesh, and correct output with "
            "ring.",
            fix="export HCCL_ALGO=level0:ring",
        )
