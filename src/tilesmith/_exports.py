"""The public names and their homes. Resolved at first use: `import tilesmith` costs nothing and loads no Triton."""

EXPORTS = {
    "KernelConfig": "tilesmith.nn",
    "MemoryConfig": "tilesmith.ops.memory",
    "explain": "tilesmith.engine",
    "optimize": "tilesmith.models",
    "optimize_kernel": "tilesmith.engine",
    "register_kernel": "tilesmith.engine",
    "undo": "tilesmith.models",
    "use": "tilesmith.engine",
}
