"""Published constants of softmax scales and YaRN magnitudes, and why scores are scaled."""

import math

import numpy as np
import pytest

from jaxattn import rope_magnitude, softmax_scale, yarn_mscale

DIGITS = 10


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ({"head_dim": 128}, 0.0883883476),
        ({"head_dim": 192}, 0.0721687836),
        ({"head_dim": 192, "yarn_factor": 40, "mscale_all_dim": 0.707}, 0.1147213868),
        ({"head_dim": 192, "yarn_factor": 40, "mscale_all_dim": 1.0}, 0.1352337789),
        ({"head_dim": 192, "yarn_factor": 1, "mscale_all_dim": 1.0}, 0.0721687836),
        ({"head_dim": 512}, 0.0441941738),
        ({"head_dim": 512, "yarn_factor": 16}, 0.0441941738),
        ({"head_dim": 128, "indexer_heads": 64}, 0.0110485435),
    ],
)
def test_constants_of_models(call, value):
    assert round(softmax_scale(**call), DIGITS) == value


def test_v3_uses_192_in_both_paths_and_not_the_latent_width():
    assert softmax_scale(128 + 64) == 192**-0.5 != softmax_scale(512 + 64)


def test_yarn_magnitudes():
    assert round(yarn_mscale(40), 6) == 1.368888
    assert yarn_mscale(1) == yarn_mscale(0.5) == yarn_mscale(16, 0) == 1
    assert rope_magnitude(40, mscale=1, mscale_all_dim=1) == 1
    assert rope_magnitude(40, mscale=1, mscale_all_dim=0) == yarn_mscale(40)
    assert rope_magnitude(16, attention_factor=0.5) == yarn_mscale(16) / 2


def test_bc33_v4_forces_the_magnitude_to_one():
    assert rope_magnitude(16, mscale=0, mscale_all_dim=0) == 1
    assert round(rope_magnitude(16), 4) == 1.2773


@pytest.mark.parametrize("D", [64, 128, 512])
def test_scaled_scores_have_variance_one_and_unscaled_ones_are_nearly_one_hot(D, rng):
    q, k = rng.standard_normal((200, D)), rng.standard_normal((200, D))
    scores = q @ k.T
    deviations = 5 * math.sqrt(2 / scores.size) * math.sqrt(D)  # rows share q, columns share k
    assert abs(np.var(scores * softmax_scale(D)) - 1) < deviations

    def largest_probability(s):
        p = np.exp(s - s.max(-1, keepdims=True))
        return (p.max(-1) / p.sum(-1)).mean()

    assert largest_probability(scores * softmax_scale(D)) < 0.2
    assert largest_probability(scores) > (0.8 if D >= 128 else 0.6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"head_dim": 1.5}, TypeError, "head_dim is compiled in and must be a Python integer, got float"),
        ({"head_dim": 64, "indexer_heads": -1}, ValueError, "indexer_heads must be at least 1, got -1"),
        ({"head_dim": 64, "yarn_factor": 0.0}, ValueError, "yarn_factor must be positive and finite or None, got 0"),
        ({"head_dim": 64, "implementation": "mosaic"}, ValueError, "must be None or one of reference, got 'mosaic'"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=f"softmax_scale: .*{message}"):
        softmax_scale(**call)
