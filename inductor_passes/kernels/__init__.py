"""Triton kernels that wait for peers inside, one a file. Importing this package imports no triton."""
