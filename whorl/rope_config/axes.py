"""Which axis each rotary pair follows where the axes are spread evenly over the pairs (openPangu)."""

from collections.abc import Sequence


def spread_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each of the R/2 pairs when the axes are spread evenly over them.

    Pair by pair the axis is taken of which the smallest share has been used, the first of equals, and never the same
    one twice in a row while another is left. With three sections the last pair follows axis 0 and counts as one of it.
    """
    counts = list(sections)
    if len(counts) == 3:
        counts[0] -= 1
    used = [0] * len(counts)
    axes: list[int] = []
    for _ in range(sum(counts)):
        left = [axis for axis, count in enumerate(counts) if used[axis] < count]
        others = [axis for axis in left if axes[-1:] != [axis]]
        axis = min(others or left, key=lambda a: (used[a] / counts[a], a))
        used[axis] += 1
        axes.append(axis)
    return (*axes, 0) if len(counts) == 3 else tuple(axes)
