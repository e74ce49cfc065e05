"""Check the call of a vendor's operator that a launch will make against the limits in whorl.contracts.

Each function returns the documented limit that the call breaks, or None. Sizes that do not matter for the limits, such
as the number of tokens, are set to 1.
"""

from collections.abc import Callable
from typing import Final

from whorl import contracts
from whorl.doctor.launch import Launch


def _dtype(launch: Launch) -> str:
    name = str((launch.text or {}).get("dtype") or (launch.text or {}).get("torch_dtype") or "bfloat16")
    return name.removeprefix("torch.")


def _heads(launch: Launch) -> int:
    return int((launch.text or {}).get("num_attention_heads") or 1)


def _mrope(launch: Launch) -> str | None:
    # The call is checked as plain RoPE, because whorl.doctor.checks.sections checks the sections.
    assert launch.rope is not None
    head, dtype = launch.rope.head_dim, _dtype(launch)
    return contracts.mrope_limit(
        query_shape=(1, _heads(launch) * head),
        key_shape=(1, head),
        positions_shape=(1,),
        rotary_dim=launch.rope.rotary_dim,
        head_size=head,
        dtype=dtype,
        table_dtype=dtype,
    )


def _rotary_mul(launch: Launch) -> str | None:
    assert launch.rope is not None
    batch, size = launch.number("micro_batch_size") or 1, launch.rope.rotary_dim
    return contracts.rotary_mul_limit(
        shape=(batch, _heads(launch), 1, size),
        cos_shape=(batch if launch.is_mrope else 1, 1, 1, size),
        dtype=_dtype(launch),
        rotary_mode="interleave" if launch.style == "pairs" else "half",
        layout="BNSD",
    )


def _interleave_rope(launch: Launch) -> str | None:
    assert launch.rope is not None
    size, dtype = launch.rope.rotary_dim, _dtype(launch)
    return contracts.interleave_rope_limit(
        shape=(1, _heads(launch), 1, size), cos_shape=(1, 1, 1, size), dtype=dtype, table_dtype=dtype
    )


def _apply_rotary(launch: Launch) -> str | None:
    assert launch.rope is not None
    head, dtype = launch.rope.head_dim, _dtype(launch)
    if launch.rope.rotary_dim != head:
        return None  # the check `partial-rotary` reports a rotary size below the head size
    return contracts.apply_rotary_pos_emb_limit(
        query_shape=(1, 1, _heads(launch), head),
        key_shape=(1, 1, 1, head),
        cos_shape=(1, 1, 1, head),
        dtype=dtype,
        table_dtype=dtype,
        rotary_mode="interleave" if launch.style == "pairs" else "half",
    )


# By operator name: the function that checks its call.
LIMITS: Final[dict[str, Callable[[Launch], str | None]]] = {
    "npu_mrope": _mrope,
    "npu_rotary_mul": _rotary_mul,
    "npu_rotary_position_embedding": _rotary_mul,
    "npu_interleave_rope": _interleave_rope,
    "npu_apply_rotary_pos_emb": _apply_rotary,
}
