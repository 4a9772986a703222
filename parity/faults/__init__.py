"""Known faults of each mechanism, under the mechanism's stem; `parity.mutations` plants them."""
