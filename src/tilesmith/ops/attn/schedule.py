"""A model of how the work of an attention call is spread over a device."""

import functools


@functools.lru_cache(maxsize=4096)
def splits_of(tiles: int, blocks: int, programs: int, traffic: float) -> int:
    """The number of splits with the shortest schedule, counted in steps of one block of keys.

    tiles: over all batch rows and kv heads. blocks: of keys, for each tile. programs: how many run at a time. traffic:
    what writing and reading back one tile's partial result costs, in steps.
    """

    def cost(splits: int) -> float:
        walk = -(-tiles * splits // programs) * (-(-blocks // splits) + 1)  # + 1: a program's start and end
        return walk if splits == 1 else walk + 2 + tiles * splits / programs * traffic  # + 2: the second launch

    return min(range(1, max(1, min(128, blocks)) + 1), key=cost)
