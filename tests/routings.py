"""Sizes of mixtures that every property of routing is tried at."""

EXPERTS, TOKENS, CHOSEN = (1, 8, 64, 128, 256, 384), (0, 1, 7, 64, 1000), tuple(range(1, 9))
SIZES = [(T, min(E, CHOSEN[(3 * i + j) % 8]), E) for i, E in enumerate(EXPERTS) for j, T in enumerate(TOKENS)]
"""Tokens, experts of each, experts: every pair of the first and last, with every number of chosen ones."""
