"""Module paths of `kernel_pytorch.utils`. What they name lives in `tilesmith.validate` and `tilesmith.bench`."""
