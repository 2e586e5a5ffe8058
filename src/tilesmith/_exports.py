"""The public names and their homes. Resolved at first use: `import tilesmith` costs nothing and loads no Triton."""

EXPORTS = {
    "KernelConfig": "tilesmith.nn",
    "MemoryConfig": "tilesmith.engine.memory",
    "explain": "tilesmith.engine",
    "fit_sequence": "tilesmith.models",
    "optimize": "tilesmith.models",
    "optimize_kernel": "tilesmith.engine",
    "register_for_sdpa": "tilesmith.models",
    "register_for_transformers": "tilesmith.models",
    "register_kernel": "tilesmith.engine",
    "report": "tilesmith.models",
    "shard_sequence": "tilesmith.models",
    "undo": "tilesmith.models",
    "use": "tilesmith.engine",
}
