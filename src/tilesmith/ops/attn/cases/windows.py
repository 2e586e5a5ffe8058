"""Windows of grouped heads, whose queries a tile may hold together, as data: name -> (sizes, options).

Sizes are batch, query heads, kv heads, tokens, keys, head dim and, where it differs, that of the values.
"""

CAUSAL = {"causal": True}

WINDOW_PACKED: dict[str, tuple[tuple[int, ...], dict]] = {
    "d256_window_packed": ((2, 8, 1, 1510, 1510, 256), CAUSAL | {"window_left": 511}),
    "d256_window_packed_one": ((2, 8, 2, 333, 333, 256), CAUSAL | {"window_left": 0}),
    "d256_window_packed_17": ((1, 8, 2, 333, 701, 256), CAUSAL | {"window_left": 16, "softcap": 9.0, "sinks": True}),
    "d256_window_packed_more_queries": ((2, 8, 1, 900, 700, 256), CAUSAL | {"window_left": 127}),
    "d256_window_packed_sinks": ((1, 16, 2, 900, 700, 256), CAUSAL | {"window_left": 200, "sinks": True}),
    "d256_window_packed_left": ((1, 8, 1, 700, 905, 256), {"window_left": 300}),
    "d256_window_packed_group_of_3": ((1, 6, 2, 500, 500, 256), CAUSAL | {"window_left": 100}),
    "d256_window_packed_group_of_6": ((1, 12, 2, 500, 500, 256), CAUSAL | {"window_left": 100}),
    "d192_window_packed": ((1, 8, 2, 605, 605, 192), CAUSAL | {"window_left": 200, "sinks": True}),
    "d192_128_window_packed": ((1, 4, 2, 605, 702, 192, 128), CAUSAL | {"window_left": 200}),
    "d128_window_packed": ((2, 16, 2, 1201, 1201, 128), CAUSAL | {"window_left": 511, "sinks": True}),
    "d128_window_packed_sides": ((1, 8, 2, 700, 1100, 128), {"window_left": 200, "window_right": 70, "softcap": 9.0}),
    "d128_window_packed_130": ((1, 8, 1, 1003, 900, 128), CAUSAL | {"window_left": 130}),
    "d128_window_packed_group_of_7": ((1, 7, 1, 700, 700, 128), CAUSAL | {"window_left": 200}),
    "d80_window_packed": ((1, 8, 2, 705, 900, 80), CAUSAL | {"window_left": 300, "softcap": 9.0}),
    "d64_window_packed": ((2, 16, 2, 1505, 1505, 64), CAUSAL | {"window_left": 1023, "sinks": True}),
    "d64_window_packed_512": ((1, 8, 1, 999, 1500, 64), CAUSAL | {"window_left": 511}),
    "d64_window_packed_long": ((1, 8, 1, 700, 8300, 64), CAUSAL | {"window_left": 900}),
}
