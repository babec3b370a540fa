"""The simulator's policies on a real GPU: real transfers, real kernels, the same report."""
