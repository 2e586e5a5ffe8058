"""Entry points for trainers of others: each file is imported by, or handed to, the library that it is named after.

None is imported by the rest of the library, and each imports its library when it is imported itself: that of
Transformers' Trainer (`trainer`), of the `kernels` package (`hub_layers`), of Axolotl (`axolotl`), LLaMA-Factory
(`llamafactory`) and torchtitan (`torchtitan`). `blocks` is what they share. The guide: docs/guides/integrations.md.
"""
