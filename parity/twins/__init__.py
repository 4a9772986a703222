"""Independent numpy forms of the ops, one per stem: they explain foreign roundings and carry planted faults."""
