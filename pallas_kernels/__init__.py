"""Pallas Mosaic GPU kernels; imports nothing but jax."""
