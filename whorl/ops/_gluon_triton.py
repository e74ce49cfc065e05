# mypy: allow-untyped-defs
"""Functions that Gluon kernels share: those whose names differ between releases of Triton, barriers, and row sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Triton 3.6 has these four functions under older names.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # by TMA, the copy engine
_memory = gl.shared_memory_descriptor
# Gives a view of the same bytes of shared memory in another dtype, shape and layout.
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
sync = getattr(gl, "barrier", None) or gl.thread_barrier


_CHECKS_VIEWS = gl.constexpr(hasattr(_memory, "reinterpret"))


@gluon.jit
def entries_from(memory, first: gl.constexpr, count: gl.constexpr):
    """Return `count` entries of shared memory from entry `first` on, to be passed to `reinterpret`.

    Triton 3.6 cannot slice them. Its `reinterpret` does not check the size, though, so the first entry is enough there.
    """
    if _CHECKS_VIEWS:
        return memory.slice(first, count)
    else:
        return memory.index(first)


@gluon.jit
def follow(OVERLAP: gl.constexpr):
    """Wait for the kernels launched before, as `follow` of _overlap_triton.py does."""
    if OVERLAP:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin(OVERLAP: gl.constexpr):
    """Let the next kernel start, as `begin` of _overlap_triton.py does."""
    if OVERLAP == 2:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        follow(OVERLAP)


@gluon.jit
def barriers(num: gl.constexpr, count: gl.constexpr):
    """Allocate `num` barriers, each of which waits for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def tell(barrier):
    """Arrive at a barrier once all threads of the warpgroup have reached this point."""
    sync()
    mbarrier.arrive(barrier)


@gluon.jit
def add(a, b):
    """Return the sum of two numbers, for scans."""
    return a + b


@gluon.jit
def rescale_factors(top, cut_top):
    """Return what `rescale_factors` of attention/cuts_triton.py does: the highest score, and two factors of sums."""
    new = gl.maximum(top, cut_top)
    shift = gl.where(new == float("-inf"), 0.0, new)
    return new, gl.exp2(top - shift), gl.exp2(cut_top - shift)


@gluon.jit
def row_sum(x, ROWS: gl.constexpr, LENGTH: gl.constexpr):
    """Return the sums of the rows of x, as `row_sum` of _sums_triton.py, with equal bits; LENGTH: 256 or more."""
    x = _add_neighbours(x, ROWS, LENGTH, LENGTH // 8)
    x = _add_halves(x, ROWS, LENGTH // 8, 32)
    return _add_neighbours(x, ROWS, 32, 1).reshape([ROWS])


@gluon.jit
def _add_neighbours(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _add_neighbours(gl.sum(x.reshape([ROWS, LENGTH // 2, 2]), 2), ROWS, LENGTH // 2, LEFT)


@gluon.jit
def _add_halves(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _add_halves(gl.sum(x.reshape([ROWS, 2, LENGTH // 2]), 1), ROWS, LENGTH // 2, LEFT)
