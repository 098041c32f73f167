"""adapt: convert decoder-only language models into adaptive ones, and run them."""

__version__ = "0.1.0"
