"""What kernels of several op families share: device functions, and the host code that prepares their launches."""
