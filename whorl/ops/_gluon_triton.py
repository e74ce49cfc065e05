# mypy: allow-untyped-defs
"""What kernels in Gluon share: names that differ between releases of Triton, and barriers in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Triton 3.6 has older names.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # by the copy engine
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # the same bytes in another shape and layout
sync = getattr(gl, "barrier", None) or gl.thread_barrier


_IS_CHECKED = gl.constexpr(hasattr(_memory, "reinterpret"))


@gluon.jit
def some(memory, first: gl.constexpr, count: gl.constexpr):
    """`count` entries from the first on, for `seen_as`. Triton 3.6 cannot cut them out, nor asks what a view takes."""
    if _IS_CHECKED:
        return memory.slice(first, count)
    else:
        return memory.index(first)


@gluon.jit
def follow(OVERLAP: gl.constexpr):
    """As that of _overlap_triton.py."""
    if OVERLAP:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barriers(num: gl.constexpr, count: gl.constexpr):
    """So many barriers, each of which waits for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def tell(barrier):
    """Arrive at it once all threads of the warpgroup are here."""
    sync()
    mbarrier.arrive(barrier)


@gluon.jit
def row_sum(x, ROWS: gl.constexpr, LENGTH: gl.constexpr):
    """[ROWS] of [ROWS, LENGTH], by the tree of _sums_triton.py; LENGTH: 256 or more."""
    x = _neighbours(x, ROWS, LENGTH, LENGTH // 8)
    x = _halves(x, ROWS, LENGTH // 8, 32)
    return _neighbours(x, ROWS, 32, 1).reshape([ROWS])


@gluon.jit
def _neighbours(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _neighbours(gl.sum(x.reshape([ROWS, LENGTH // 2, 2]), 2), ROWS, LENGTH // 2, LEFT)


@gluon.jit
def _halves(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _halves(gl.sum(x.reshape([ROWS, 2, LENGTH // 2]), 1), ROWS, LENGTH // 2, LEFT)
