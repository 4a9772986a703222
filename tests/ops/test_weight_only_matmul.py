"""What weight-only products promise: the product with the dequantized weight, in every format."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import weight_only_matmul
from jaxattn.ops._weight_only_matmul_cases import _tiled, make_inputs
from jaxattn.ops.weight_only_matmul import MECHANISM
from jaxattn.quant import tiles, weights
from pallas_kernels import _aot, _mosaic
from pallas_kernels._decode import Code
from pallas_kernels.weight_only_matmul import Config, configs, default_config
from parity.twins import weight_only_matmul as twin

SMOKE = [c for c in MECHANISM.cases if "smoke" in c.tags and "tiled" not in c.name]


@pytest.mark.parametrize("case", SMOKE, ids=lambda c: c.name)
def test_the_identity_reads_the_weight(case, rng):
    """x = 1 picks out W, in the dtype of x: no rounding but the weight's."""
    args = case.make(rng)
    M = args["x"].shape[1]
    args["x"] = jnp.eye(M, dtype=args["x"].dtype)
    found = jax.jit(lambda x: weight_only_matmul(**(args | {"x": x})))(args["x"])
    host = {n: np.asarray(v) if hasattr(v, "shape") else v for n, v in args.items()}
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), twin.weight(host, False))


@pytest.mark.parametrize("format", weights.FORMATS)
def test_every_format_is_near_the_weight_it_was_made_of(format, rng):
    args = make_inputs(rng, 8, 128, 64, format, dtype="float32", group=64)
    again = make_inputs(np.random.default_rng(5), 8, 128, 64, format, dtype="float32", group=64)
    draw = np.random.default_rng(5)
    draw.standard_normal((8, 128))
    W = draw.standard_normal((128, 64)) * 0.05
    x = np.asarray(args["x"], np.float64)
    got = np.asarray(weight_only_matmul(**(again | {"x": args["x"]})), np.float64)
    lost = np.linalg.norm(got - x @ W) / np.linalg.norm(x @ W)
    assert lost < (2.0**-4 if format in ("int8", "fp8", "mxfp8") else 2.0**-2)


PAIRS = 2.0**-16
"""Half an ulp of bfloat16's bfloat16 remainder, twice: what two numbers lose of a float32 scale."""


@pytest.mark.parametrize("M", [256, 400])
@pytest.mark.parametrize("format", weights.FORMATS)
def test_tiles_hold_the_weight(format, M, rng):
    """Packing moves codes and scales, and rounds nothing but float32 scales of blocks, which become pairs."""
    M = M if format in ("gptq", "awq", "int8", "fp8", "wna16") else 256
    args = make_inputs(rng, 8, M, 128, format, group=80 if M == 400 else 32)
    given = {name: value for name, value in args.items() if name != "x"}
    packed = tiles.pack(M=M, dtype="bfloat16", **given)
    assert packed.pop("tiled")
    inexact = format in ("nf4", "fp4", "nvfp4")  # nvfp4: (code * block) * scale instead of code * (block * scale)
    dtype = "float32" if inexact else "bfloat16"
    got, wanted = tiles.dequantize(M=M, dtype=dtype, **packed), weights.dequantize(M=M, dtype=dtype, **given)
    got, wanted = (np.asarray(x).astype(np.float64) for x in (got, wanted))
    if inexact:
        assert (np.abs(got - wanted) <= PAIRS * np.abs(wanted)).all()
    else:
        np.testing.assert_array_equal(got, wanted)


def test_tiles_sort_act_order(rng):
    args = make_inputs(rng, 8, 256, 64, "gptq", act_order=True)
    given = {name: value for name, value in args.items() if name != "x"}
    packed = tiles.pack(M=256, dtype="bfloat16", **given)
    order = np.asarray(packed["g_idx"])
    assert (np.diff(np.asarray(args["g_idx"])[order]) >= 0).all()
    assert packed.pop("tiled")
    got = tiles.dequantize(M=256, dtype="bfloat16", **packed)
    np.testing.assert_array_equal(got, weights.dequantize(M=256, dtype="bfloat16", **given))
    given["g_idx"] = jnp.arange(256, dtype=jnp.int32) // 64
    assert "g_idx" not in tiles.pack(M=256, dtype="bfloat16", **given)


def test_tiles_refuse(rng):
    args = make_inputs(rng, 8, 256, 64, "gptq", act_order=True)
    given = {name: value for name, value in args.items() if name != "x"}
    wrong = {
        "tiles.pack: the 4 groups of g_idx must have equal sizes, got [256, 0, 0, 0]": {
            "g_idx": jnp.zeros(256, jnp.int32)
        },
        "tiles.pack: x must be bfloat16 or float16, got float32": {"dtype": "float32"},
        "tiles.pack: the output features must be a multiple of 64, got 32; pad the weight": {
            "w": given["w"][:, :32],
            "scales": given["scales"][:, :32],
            "zeros": given["zeros"][:, :4],
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            tiles.pack(**({"M": 256, "dtype": "bfloat16"} | given | changes))
    traced = "tiles.pack: values of g_idx must be known, got a traced array; pack outside jit"
    with pytest.raises(ValueError, match=f"^{traced}(\n|$)"):
        jax.jit(lambda g: tiles.pack(M=256, dtype="bfloat16", **(given | {"g_idx": g}))["w"])(given["g_idx"])


CONFIGS = {
    "own-features": Config(tokens=64, warpgroups=2, stages=2),
    "own-features-cluster": Config(tokens=16, warpgroups=2, stages=2, cluster=2),
    "own-features-cluster-odd": Config(tokens=32, warpgroups=1, stages=2, cluster=2),
    "split-2": Config(tokens=32, warpgroups=2, split=True, stages=3),
    "split-4-deep": Config(tokens=8, warpgroups=4, split=True, deep=2, stages=2),
    "split-1": Config(tokens=128, warpgroups=1, split=True, stages=2, width=1),
    "split-2-boxed": Config(tokens=32, warpgroups=2, split=True, stages=2, boxed=True),
    "own-features-boxed": Config(tokens=8, warpgroups=2, deep=2, stages=2, boxed=True),
    "split-2-late": Config(tokens=16, warpgroups=2, split=True, deep=2, stages=2),
    "split-2-together": Config(tokens=32, warpgroups=2, split=True, stages=3, together=2),
    "own-features-together-late": Config(tokens=8, warpgroups=1, stages=2, together=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_to_tile_multiplies_whole_numbers_exactly(name, rng):
    """Codes minus zero points, scales of 1 or 2 and small activations leave nothing to round but the result."""
    config = CONFIGS[name]
    N, M = (24, 704) if config.boxed else (21, 656)
    dtype = "float16" if "together" in name else "bfloat16"
    args = make_inputs(rng, N, M, 256, "gptq", group=M, dtype=dtype)
    args["scales"] = jnp.asarray(rng.integers(1, 3, args["scales"].shape), dtype)
    args["x"] = jnp.asarray(rng.integers(-3, 4, args["x"].shape), dtype)
    with _mosaic.interpret():
        got = weight_only_matmul(**args, implementation="mosaic", config=config)
    np.testing.assert_array_equal(got, weight_only_matmul(**args, implementation="reference"))


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-block", "mxfp8"])
def test_a_nan_code_spoils_its_output_feature(kind, rng):
    """Both signs, in the tiles' first and last input; and no other feature."""
    w = np.clip(rng.standard_normal((128, 256)), -3, 3).astype(np.float32)
    w[3, 0], w[70, 255] = np.nan, -np.nan
    w = jnp.asarray(w).astype("float8_e4m3fn")
    scales = {
        "fp8-channel": jnp.ones((128, 1)),
        "fp8-block": jnp.ones((1, 2)),
        "mxfp8": jnp.full((128, 8), 127, jnp.uint8),
    }[kind]
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.bfloat16)
    args = {"format": kind.partition("-")[0]}
    packed = tiles.pack(w, scales, M=256, dtype="bfloat16", **args)
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        kernel = np.asarray(weight_only_matmul(x, **packed, implementation="mosaic"), np.float32)
    want = np.zeros((3, 128), bool)
    want[:, [3, 70]] = True
    np.testing.assert_array_equal(np.isnan(kernel), want)
    for given in (packed, {"w": w, "scales": scales, **args}):
        o = np.asarray(weight_only_matmul(x, **given, implementation="reference"), np.float32)
        np.testing.assert_array_equal(np.isnan(o), want)


def test_a_row_of_nan_spoils_no_other(rng):
    args = make_inputs(rng, 5, 256, 64, "mxfp4")
    clean = np.asarray(weight_only_matmul(**args, implementation="reference")).astype(np.float32)
    args["x"] = args["x"].at[2].set(jnp.nan)
    with _mosaic.interpret():
        got = np.asarray(weight_only_matmul(**args, implementation="mosaic")).astype(np.float32)
    assert np.isnan(got[2]).all()
    kept = [0, 1, 3, 4]
    np.testing.assert_array_equal(got[kept], clean[kept])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 24}, "tokens must be 8, 16, 32, 64, 128 or 256, got 24"),
        ({"warpgroups": 5}, "warpgroups must be 1, 2, 3 or 4, got 5"),
        ({"deep": 3}, "deep must be 1 or 2, got 3"),
        ({"cluster": 4}, "cluster must be 1 or 2, got 4"),
        ({"stages": 1}, "stages must lie between 2 and 16, got 1"),
        ({"boxed": True, "cluster": 2}, "boxed activations belong to one thread block, got cluster=2"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"together": 0}, "together must be at least 1, got 0"),
    ],
)
def test_wrong_configurations(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Config(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Config(tokens=128, warpgroups=4, split=True),
            "4 warpgroups have registers for 64 activation rows, got tokens=128",
        ),
        (
            Config(tokens=8, warpgroups=2, cluster=2),
            "cluster=2 needs output features in multiples of 256, got 64",
        ),
        (
            Config(tokens=8, stages=2, boxed=True),
            "boxed needs input features in multiples of 64 and up to 8 rows or a multiple, got 256 and 12",
        ),
        (
            Config(tokens=256, stages=4),
            "tokens=256, warpgroups=2, deep=1, stages=4 needs 316416 bytes of shared memory, more than 232448; use "
            "smaller values",
        ),
    ],
)
def test_configurations_that_do_not_fit(config, message, rng):
    args = make_inputs(rng, 12 if config.boxed else 5, 256, 64, "gptq")
    expected = f"^weight_only_matmul: {re.escape(message)}(\n|$)"
    with _mosaic.interpret(), pytest.raises(ValueError, match=expected):
        weight_only_matmul(**args, implementation="mosaic", config=config)


@pytest.mark.aot
@pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")
@pytest.mark.parametrize(("N", "M"), [(67, 256), (1, 1024)], ids=["odd-rows-cluster", "one-piece"])
def test_shapes_that_no_case_has_compile(N, M):
    """Odd rows that thread blocks share, and slots of several tiles that one copy brings."""
    args = _tiled("gptq", "float16", N=N, M=M, F=256)
    config = default_config(N=N, M=M, F=256, bits=4)
    assert (config.cluster, config.deep * config.warpgroups) == ((2, 1) if N == 67 else (1, M // 128))
    arrays = {name: x for name, x in args.items() if hasattr(x, "shape")}
    static = {name: x for name, x in args.items() if name not in arrays}
    _aot.compile_h200(lambda arrays: weight_only_matmul(**arrays, **static, implementation="mosaic"), arrays)


def test_every_default_configuration_fits():
    for N in (1, 9, 33, 65, 129):
        for bits in (4, 8):
            sizes: dict[str, Any] = {"N": N, "M": 2880, "F": 2880, "bits": bits}
            assert default_config(**sizes) in list(configs(**sizes)), sizes


CODES = {
    "gptq": Code(kind="u4", dtype=jnp.dtype(jnp.float16), scale="value", zeros=True),
    "mxfp4": Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16), scale="value", groups=4),
    "int8": Code(kind="s8", dtype=jnp.dtype(jnp.bfloat16)),
}
FEW: dict[str, Any] = {"warpgroups": 4, "split": True, "deep": 2, "stages": 4}


@pytest.mark.parametrize(
    ("kind", "N", "expected"),
    [
        ("gptq", 1, Config(tokens=8, **FEW, together=2)),
        ("mxfp4", 1, Config(tokens=8, **FEW, boxed=True)),
        ("int8", 1, dataclasses.replace(Config(tokens=8, **FEW), deep=1)),
        ("gptq", 16, dataclasses.replace(Config(tokens=16, **FEW), stages=3, boxed=True)),
        ("gptq", 64, Config(tokens=64, warpgroups=2, split=True, boxed=True)),
        ("gptq", 128, Config(tokens=128, warpgroups=1, split=True, cluster=2, stages=5, together=4)),
        ("int8", 128, Config(tokens=128, warpgroups=2, split=True, cluster=2, stages=2)),
        ("gptq", 2048, Config(tokens=256, warpgroups=2, cluster=2, stages=3)),
    ],
)
def test_default_configurations(kind, N, expected):
    sizes: dict[str, Any] = {"N": N, "M": 8192, "F": 8192, "bits": 8 if kind == "int8" else 4}
    assert default_config(**sizes, code=CODES[kind]) == expected
    assert expected in list(configs(**sizes, code=CODES[kind]))


def test_every_format_has_a_case():
    assert {c.make(np.random.default_rng(0))["format"] for c in SMOKE} == set(weights.FORMATS)


GPTQ = {
    "w": jnp.zeros((16, 64), jnp.int32),
    "scales": jnp.ones((2, 64)),
    "zeros": jnp.zeros((2, 8), jnp.int32),
    "format": "gptq",
}
WRONG = {
    "format": ({"format": "gguf"}, ValueError, f"format must be one of {', '.join(weights.FORMATS)}, got 'gguf'"),
    "bits": ({"bits": 5}, ValueError, "bits of gptq must be one of (2, 3, 4, 8), got 5"),
    "zeros": ({"zeros": None}, ValueError, "format 'gptq' needs zeros; pass it"),
    "global": ({"global_scale": 1.0}, ValueError, "format 'gptq' knows no global_scale; leave it out"),
    "dtype": (
        {"scales": jnp.ones((2, 64), jnp.float16)},
        TypeError,
        "scales must have dtype float32, got float16",
    ),
    "w-dtype": ({"w": jnp.zeros((16, 64), jnp.uint8)}, TypeError, "w must have dtype int32, got uint8"),
    "w": (
        {"w": jnp.zeros((8, 64), jnp.int32)},
        ValueError,
        "w of format 'gptq' must be (16, 64) for 128 input features, got (8, 64)",
    ),
    "qzeros": (
        {"zeros": jnp.zeros((2, 64), jnp.int32)},
        ValueError,
        "zeros of format 'gptq' must be (2, 8) for 128 input features, got (2, 64)",
    ),
    "groups": (
        {"scales": jnp.ones((3, 64)), "zeros": jnp.zeros((3, 8), jnp.int32)},
        ValueError,
        "the groups of scales must divide the 128 input features, got 3",
    ),
    "list": ({"w": [[1]]}, TypeError, "w must be an array, got list"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    with pytest.raises(error, match=f"^weight_only_matmul: {re.escape(message)}$"):
        weight_only_matmul(jnp.ones((2, 128)), **(GPTQ | changes))
