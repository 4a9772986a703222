"""One module per mechanism: the op, its reference and its record."""
