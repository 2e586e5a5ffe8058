"""Groups of query heads that no two parts divide evenly, as data: name -> (sizes, options).

Sizes are batch, query heads, kv heads, tokens, keys, head dim and, where it differs, that of the values.
"""

CAUSAL = {"causal": True}
DOCUMENTS = CAUSAL | {"cu_seqlens_q": (300, 5, 390), "cu_seqlens_k": (300, 5, 390)}

UNEVEN_GROUPS: dict[str, tuple[tuple[int, ...], dict]] = {
    "d64_group_of_71": ((2, 71, 1, 300, 300, 64), CAUSAL),
    "d64_group_of_7": ((2, 14, 2, 520, 520, 64), CAUSAL),
    "d64_group_of_5_window": ((1, 10, 2, 700, 700, 64), CAUSAL | {"window_left": 200, "sinks": True}),
    "d64_group_of_5_turns": ((2, 10, 2, 600, 600, 64), CAUSAL | {"deterministic": True}),
    "d64_group_of_5_packed": ((1, 10, 2, 695, 695, 64), DOCUMENTS),
    "d64_group_of_5_lists": ((1, 10, 2, 600, 600, 64), CAUSAL | {"lists": (1, 10, 128, 128, 0.5)}),
    "d80_group_of_5": ((1, 10, 2, 333, 517, 80), CAUSAL | {"sinks": True}),
    "d128_group_of_5_packed": ((1, 10, 2, 695, 695, 128), DOCUMENTS),
    "d128_group_of_5_dropout": ((2, 10, 2, 520, 520, 128), CAUSAL | {"dropout_p": 0.2}),
    "d128_group_of_5_dropout_packed": ((1, 10, 2, 695, 695, 128), DOCUMENTS | {"dropout_p": 0.2}),
    "d192_128_group_of_5": ((2, 10, 2, 300, 400, 192, 128), CAUSAL),
    "d256_group_of_7": ((1, 14, 2, 400, 400, 256), CAUSAL),
    "d256_group_of_5_packed": ((1, 10, 2, 695, 695, 256), DOCUMENTS),
}
