"""4-bit weights: layout, quantisers, products and kernels. Knows no models."""
