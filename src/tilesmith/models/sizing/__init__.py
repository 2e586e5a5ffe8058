"""What fits a device: estimates, real runs that leave no trace, batch sizes, the memory of a training run."""
