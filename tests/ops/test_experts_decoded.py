"""The kernel of `experts` that decodes weights of four bits in registers."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import experts
from jaxattn.ops._expert_cases import struct
from jaxattn.ops.experts import MECHANISM
from jaxattn.quant import primitives as p
from pallas_kernels import _decode, _expert_codes, _mosaic, _nibbles
from pallas_kernels import _decoded_config as legality
from pallas_kernels import _experts_decoded as decoded

TILE = {"tokens": 16, "warpgroups": 1, "stages": 2}
MEGAMOE = {"format": "mxfp4", "act_group": 32, "weight_on": "activation", "limit": 2.0}
CODES = {"tokens": 16, "warpgroups": 2, "stages": 2, "eight": True, "staged": True, "encoder": True, "codes": True}
OSS = {"format": "mxfp4", "activation": "swigluoai", "limit": 7.0, "bias": True}


def kernel(args, **config):
    """The op by its kernel: on the GPU if there is one, else interpreted."""
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        config = decoded.Config(**config) if config else None
        return np.asarray(jax.jit(lambda: experts(**args, implementation="decoded", config=config))())


def reference(args):
    return np.asarray(jax.jit(lambda: experts(**args, implementation="reference"))())


def random_inputs(rng, T, A, E, M, F, **options):
    """Random codes and scales, which need no quantizer, for the shapes of `struct`."""

    def draw(name, x):
        if not hasattr(x, "shape"):
            return x
        if name == "ids":
            return jnp.asarray(np.stack([rng.permutation(E)[:A] for _ in range(T)]), x.dtype)
        if x.dtype == jnp.uint8 and not name.endswith("scale"):
            return jnp.asarray(rng.integers(0, 256, x.shape), x.dtype)
        if name.endswith("scale"):
            powers = rng.integers(-5, -2, x.shape)
            return jnp.asarray(127 + powers if x.dtype == jnp.uint8 else np.exp2(powers), x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype)

    return {name: draw(name, x) for name, x in struct(T, A, E, M, F, **options).items()}


def steps_apart(a, b):
    """Share of results that differ; more than two steps of bfloat16 or float16 apart fails."""
    steps = np.abs(a.view(np.int16).astype(int) - b.view(np.int16).astype(int))
    large = np.abs(np.float32(b)) > np.abs(np.float32(b)).max() / 64  # elsewhere sums cancel
    assert steps[large].max(initial=0) <= 2
    return (steps > 0).mean()


@pytest.mark.parametrize(
    ("T", "M", "F", "config", "options"),
    [
        (9, 64, 128, TILE | {"eight": True}, MEGAMOE),
        (
            9,
            64,
            192,
            TILE | {"warpgroups": 2, "eight": True, "staged": True, "encoder": True, "inputs": 256},
            MEGAMOE,
        ),
        (9, 64, 192, TILE | {"warpgroups": 2}, {"format": "nvfp4"}),
        (9, 192, 64, TILE, OSS),
        (20, 128, 128, TILE | {"stages": 3}, OSS | {"format": "wna16", "zeros": True, "dtype": "float16"}),
        (20, 128, 128, TILE | {"tokens": 24, "eight": True}, {"format": "mxfp4", "act_group": 128}),
        (20, 64, 64, TILE | {"block": 16}, MEGAMOE),
        (20, 256, 128, CODES | {"fused": False}, OSS | {"act_group": 128}),
        (20, 128, 128, CODES | {"tokens": 32, "block": 16, "together": True, "overlap": 2, "fused": False}, MEGAMOE),
        (20, 320, 64, TILE | {"overlap": 2, "inputs": 256, "together": True}, OSS),
        (9, 64, 128, TILE | {"tokens": 8, "eight": True, "inputs": 256}, MEGAMOE),
    ],
)
def test_every_path_of_the_kernel(T, M, F, config, options, rng):
    args = random_inputs(rng, T, 2, 3, M, F, **options)
    assert steps_apart(kernel(args, **config), reference(args)) < 1 / 100


def test_experts_without_tokens_are_not_read(rng):
    """Their scales are NaN, and so are those of the experts before and behind, in memory."""
    args = random_inputs(rng, 9, 1, 3, 64, 64, format="mxfp4")
    args["ids"] = 0 * args["ids"] + 1
    clean = reference(args)
    for name in ("w13_scale", "w2_scale"):
        args[name] = args[name].at[np.array([0, 2])].set(255)
    for config in (TILE, TILE | {"tokens": 8, "inputs": 256}):
        np.testing.assert_array_equal(kernel(args, **config).view(np.int16), clean.view(np.int16))


@pytest.mark.parametrize(
    ("T", "format", "group"), [(1, "wna16", None), (33, "wna16", None), (64, "nvfp4", None), (64, "mxfp4", 32)]
)
def test_few_tokens_may_all_choose_one_expert(T, format, group, rng):
    """Tiles are for what experts get on average: one that gets all tokens takes several."""
    args = random_inputs(rng, T, 1, 32, 128, 128, format=format, act_group=group)
    args["ids"] = 0 * args["ids"] + 7
    assert decoded.default_config(**MECHANISM.prepare(**args)).tokens == 8
    assert steps_apart(kernel(args), reference(args)) < 1 / 100


def test_scales_decoded_by_who_loads_change_no_bit(rng):
    """Neither do codes of 2^-127 and NaN, and 192 features of gates and ups in turn do not fill two tiles."""
    args = random_inputs(rng, 9, 2, 3, 192, 192, **MEGAMOE | {"activation": "swigluoai", "bias": True})
    for name in ("w13_scale", "w2_scale"):
        args[name] = args[name].at[0, 3, 1].set(0).at[1, 190, 0].set(255)
    how = {"tokens": 8, "warpgroups": 4, "stages": 2, "eight": True}
    more = ({"staged": True, "inputs": 256}, {})
    found, wanted = (kernel(args, **how, **options).view(np.int16) for options in more)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("more", [{"overlap": 4}, {"inputs": 256, "together": True}])
def test_how_steps_follow_each_other_changes_no_bit(more, rng):
    args = random_inputs(rng, 12, 2, 3, 192, 64, format="mxfp4")
    found, wanted = (kernel(args, **TILE | options).view(np.int16) for options in (more, {}))
    np.testing.assert_array_equal(found, wanted)


def test_scales_far_from_one_are_exact(rng):
    """Powers from 2^-60 on do not lose a bit in bfloat16, where decoded weights are 2^-63 of themselves."""
    args = random_inputs(rng, 8, 1, 1, 64, 64, format="mxfp4")
    for name, shift in (("w13_scale", -40), ("w2_scale", 40)):
        args[name] = (args[name].astype(jnp.int32) + shift).astype(jnp.uint8)
    found = kernel(args, **TILE | {"tokens": 8})
    np.testing.assert_array_equal(found.view(np.int16), reference(args).view(np.int16))


def test_codes_are_exact_where_powers_of_a_feature_differ_by_up_to_26(rng):
    args = random_inputs(rng, 9, 2, 2, 256, 128, **MEGAMOE)
    for name in ("w13_scale", "w2_scale"):
        args[name] = jnp.asarray(rng.integers(110, 110 + _expert_codes.EXACT + 1, args[name].shape), jnp.uint8)
    assert steps_apart(kernel(args, **CODES), reference(args)) < 1 / 100


@pytest.mark.parametrize(
    "config",
    [
        CODES | {"inputs": 256, "overlap": 2},
        TILE | {"overlap": 4},
        TILE | {"tokens": 8, "warpgroups": 2, "eight": True, "staged": True},
    ],
)
def test_the_shortest_ring_ends_where_a_thread_block_has_several_tiles(config, rng, monkeypatch):
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args = random_inputs(rng, 12, 2, 3, 384, 128, **MEGAMOE)
    assert steps_apart(kernel(args, **config | {"stages": 2}), reference(args)) < 1 / 100


def test_codes_between_the_products_are_those_of_the_quantizer(rng, monkeypatch):
    """Thread blocks have several tiles of one step, so that a warpgroup may be a tile ahead of the other."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args = random_inputs(rng, 9, 2, 3, 128, 256, **MEGAMOE)
    fused, apart = (kernel(args, **CODES, fused=fused).view(np.int16) for fused in (True, False))
    np.testing.assert_array_equal(fused, apart)


# ---------------------------------------------------------------- its parts
@pytest.mark.parametrize("d", [0, 7, 26, 27, 200])
def test_codes_of_a_group_are_its_magnitudes_times_a_power(d):
    words = jnp.asarray([230 | (230 - d) << 8 | 30 << 16], jnp.int32)
    found = np.asarray(_expert_codes.tables(words))[0].astype("<i4")
    found = found.view("u1").view(jnp.float8_e5m2).astype(np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(found[0], values * 2.0**_expert_codes.LIFT)
    np.testing.assert_array_equal(found[1], values * (2.0 ** (_expert_codes.LIFT - d) if d <= 26 else 0))
    np.testing.assert_array_equal(found[2:], 0)


class Registers:
    """The instructions that `_expert_codes` decodes with, on numbers."""

    const = masked = staticmethod(lambda x, mask=0xFFFFFFFF: x & mask)
    right = staticmethod(lambda x, n: (x >> n if n > 0 else x << -n) & 0xFFFFFFFF)
    picked = staticmethod(lambda x, mask, more: x & mask | more)

    @staticmethod
    def permute(a, b, selector):
        given = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        which = [selector >> 4 * i & 15 for i in range(4)]
        return int.from_bytes([255 * (given[w & 7] >> 7) if w & 8 else given[w] for w in which], "little")


def test_eight_codes_of_a_word_in_registers(rng):
    registers: Any = Registers()
    nibbles = rng.permutation(16)
    tables = np.asarray(_expert_codes.tables(jnp.asarray([20 | 17 << 8 | 6 << 16], jnp.int32)))[0]
    for d, table in zip((0, 3, 14), tables, strict=False):
        magnitudes = [int(x) & 0xFFFFFFFF for x in table]
        words = [sum(int(n) << 4 * i for i, n in enumerate(half)) for half in (nibbles[:8], nibbles[8:])]
        found = [x for word in words for x in _expert_codes._Emitter.codes(registers, word, magnitudes)]
        found = np.array(found, "<u4").view("u1").view(jnp.float8_e5m2).astype(np.float64)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** (_expert_codes.LIFT - d)
        np.testing.assert_array_equal(found, np.where(nibbles < 8, 1, -1) * values[nibbles % 8])


def test_the_order_of_inputs_is_the_same_on_both_sides(rng):
    codes = rng.integers(0, 16, (64, 128))
    words = jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4, jnp.uint8)
    for eight, dtype in ((False, jnp.bfloat16), (True, jnp.float8_e4m3fn)):
        rows = _nibbles.permute(jnp.asarray(codes, dtype))
        assert sorted(np.asarray(_nibbles.permute(jnp.arange(128, dtype=jnp.uint8 if eight else jnp.uint16)))) == [
            *range(128)
        ]
        np.testing.assert_array_equal(np.float32(rows), np.float32(_nibbles.unpacked(words, eight)))
    x = jnp.asarray(codes, jnp.uint8)
    np.testing.assert_array_equal(_nibbles.restore(_nibbles.permute(x)), x)
    order = np.asarray(_expert_codes.permute(jnp.arange(128)))
    b, m, k, c, i = (n.reshape(-1) for n in np.indices((2, 2, 2, 4, 4)))
    np.testing.assert_array_equal(order, 64 * b + 16 * c + 8 * m + 4 * k + i)


def test_scales_as_powers_of_two():
    codes = np.array([1, 64, 127, 190, 254, 255])
    wanted = np.asarray(p.ue8m0_value(jnp.asarray(codes, jnp.uint8)))
    words = jnp.asarray(codes | 127 << 8, jnp.int32)
    np.testing.assert_array_equal(_nibbles.power(words, 0), wanted)
    np.testing.assert_array_equal(_nibbles.power(words, 1), np.ones(6))
    code = _decode.Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16), scale="value", groups=2, lowered=True)
    bits = jnp.asarray([0, 1, 127, 190, 191, 192, 255], jnp.int32)
    found = np.float32(_nibbles.numbers(code, "ue8m0", bits)) * 2.0**-_nibbles.LIFT
    np.testing.assert_array_equal(found, [*np.exp2(np.array([0, 1, 127, 190, 191]) - 127.0), np.nan, np.nan])


def test_tiles_that_multiply_the_fewest_rows():
    assert legality.best_rows(96) == 112
    assert legality.best_rows(1e5) == legality.MOST
    assert [legality.best_rows(mean) for mean in (0.4, 2, 2.1)] == [8, 8, 16]


def test_the_configurations_are_legal_and_fit_the_path():
    for T in (1, 16, 64, 4096):
        for format, group in (("mxfp4", None), ("mxfp4", 32), ("mxfp4", 128), ("nvfp4", 128)):
            options: dict[str, Any] = {"format": format, "act_group": group}
            args = MECHANISM.prepare(**struct(T, 6, 256, 4096, 2048, **options))
            default, found = decoded.default_config(**args), list(decoded.configs(**args))
            known = {name: args[name] for name in ("format", "act_group", "ue8m0")} | {"sizes": (4096, 2048)}
            assert found
            assert all(legality.illegal(c, **known) is None for c in [default, *found])
            assert default.eight == (T <= 64 and format == "mxfp4" and group is not None)
            assert any(c.codes for c in found) == (format == "mxfp4" and group is not None)
            assert (default.tokens, default.inputs) == ((112, 128) if T > 64 else (8, 256))
            assert default.together == (T > 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokens": 12}, "tokens must be a multiple of 8 up to 128, got 12"),
        ({"tokens": 72, "eight": True}, "tokens must be a multiple of 8 up to 64, got 72"),
        ({"tokens": 24, "block": 16}, "tokens must be a multiple of block=16, got 24"),
        ({"staged": True}, "staged needs eight and 2 or 4 warpgroups, got eight=False and warpgroups=2"),
        ({"eight": True, "overlap": 2}, "overlap=2 is for products without eight; with codes it may be 2"),
        ({"encoder": True}, "encoder is for products with eight"),
        ({"inputs": 64}, "inputs must be 128 or 256, got 64"),
        ({"block": 24}, "block must be 8, 16, 32 or 64, got 24"),
        ({"warpgroups": 5}, "warpgroups must be 1, 2, 3 or 4, got 5"),
        ({"stages": 17}, "stages must lie between 2 and 16, got 17"),
        ({"codes": True, "eight": True}, "codes needs staged=True, got staged=False"),
        (CODES | {"tokens": 136}, "tokens must be a multiple of 8 up to 128, got 136"),
    ],
)
def test_an_illegal_configuration_cannot_be_built(config, message):
    with pytest.raises(ValueError, match=message):
        decoded.Config(**config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TILE | {"eight": True}, "eight needs mxfp4 weights and act_group, got mxfp4 and None"),
        (CODES, "eight needs mxfp4 weights and act_group, got mxfp4 and None"),
        (
            {"tokens": 128, "warpgroups": 4, "stages": 8},
            "stages=8 of inputs=128 needs .* bytes of shared memory, more than 232448",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config, message, rng):
    with pytest.raises(ValueError, match=message):
        kernel(random_inputs(rng, 9, 2, 3, 64, 64, format="mxfp4"), **config)


def test_codes_need_whole_blocks_and_powers_of_two(rng):
    args = random_inputs(rng, 9, 2, 3, 128, 64, format="mxfp4", act_group=32)
    with pytest.raises(ValueError, match="codes needs M and F in multiples of 128, got M=128 and F=64"):
        kernel(args, **CODES)
    with pytest.raises(ValueError, match="codes needs ue8m0=True, got False"):
        kernel(args | {"ue8m0": False}, **CODES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int8"}, "only weights of four bits are decoded .wna16, mxfp4 or nvfp4., got int8"),
        ({"format": "mxfp4", "dtype": "float16"}, "x must be bfloat16 with mxfp4 weights, got float16"),
        (
            {"format": "mxfp4", "M": 96},
            "M and F must be multiples of 64, got M=96 and F=512; pad the weights with zeros",
        ),
    ],
)
def test_what_the_kernel_refuses(options, message):
    with pytest.raises(AssertionError, match=message):
        assert not decoded.why_not(**MECHANISM.prepare(**struct(**options)))
