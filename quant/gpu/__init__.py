"""Products and small operations on a CUDA device, in Triton. Nothing here is imported on a CPU."""
