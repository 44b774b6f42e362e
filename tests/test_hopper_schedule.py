"""Which blocks Hopper's kernel of attention cuts into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here")


# the first example imports the kernel.
@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 600))
def test_a_cut_tail_is_what_full_rounds_leave(blocks: int, programs: int, steps: int) -> None:
    from vidsparse.kernels.attention.hopper.schedule import MOST_PARTS, split_tail

    whole, parts = split_tail(blocks, programs, steps)
    assert 1 <= parts <= MOST_PARTS
    if parts == 1:
        assert whole == blocks
    else:
        # never more steps for the busiest program than with whole blocks.
        assert 0 <= whole < blocks
        assert whole % programs == 0
        rounds = whole // programs * steps
        rounds += -(-(blocks - whole) * parts // programs) * -(-steps // parts)
        assert rounds < -(-blocks // programs) * steps


def test_four_blocks_too_many_are_cut_and_full_rounds_are_not() -> None:
    from vidsparse.kernels.attention.hopper.schedule import split_tail

    assert split_tail(31 * 132 + 4, 132, 77) == (31 * 132, 8)
    assert split_tail(31 * 132, 132, 77) == (31 * 132, 1)
    # lists too short to be worth it.
    assert split_tail(31 * 132 + 4, 132, 6) == (31 * 132 + 4, 1)
