# mypy: allow-untyped-defs
"""What kernels in Gluon share: names that differ between releases of Triton, and barriers in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

# Triton 3.6 has older names.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
sync = getattr(gl, "barrier", None) or gl.thread_barrier


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
