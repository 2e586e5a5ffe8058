"""Device functions in Gluon (Triton's explicit dialect, for Hopper) that op families share."""
