import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import experts, megamoe_staged
from jaxattn.ops._expert_cases import make_inputs, struct
from jaxattn.ops.experts import MECHANISM
from jaxattn.quant import fp8
from pallas_kernels import _mosaic, _row_copies
from pallas_kernels import experts as mosaic
from parity.twins import experts as twin
from tests import routings

EPS = float(jnp.finfo(jnp.float32).eps)


def exact(args):
    """The op in float64, from its numpy twin."""
    host = {name: np.asarray(x) if hasattr(x, "shape") else x for name, x in args.items()}
    return twin.run(host, True)["o"]


def error(o, args):
    """RMS error over RMS of the truth."""
    truth = exact(args)
    return np.sqrt(np.mean((np.float64(o) - truth) ** 2) / np.mean(truth**2))


@pytest.mark.parametrize(("T", "k", "E"), routings.SIZES)
def test_float32_experts_are_a_dense_loop(T, k, E, rng):
    args = make_inputs(rng, T, k, E, 32, 16, dtype="float32", limit=1.0)
    o = experts(**args)
    assert o.shape == (T, 32)
    assert T == 0 or error(o, args) < 8 * EPS


def test_bc55_experts_without_tokens_and_one_with_all(rng):
    args = make_inputs(rng, 8, 1, 5, 32, 16, dtype="float32")
    for groups in ([0, 3, 0, 5, 0], [0, 0, 0, 0, 8], [8, 0, 0, 0, 0]):
        ids = np.repeat(np.arange(5), groups)
        case: dict[str, Any] = args | {"ids": jnp.asarray(ids[:, None], jnp.int32)}
        unused = jnp.asarray(np.asarray(groups) == 0)[:, None, None]
        poisoned: dict[str, Any] = case | {name: jnp.where(unused, jnp.nan, case[name]) for name in ("w13", "w2")}
        np.testing.assert_array_equal(experts(**poisoned), experts(**case))
        assert error(experts(**case), case) < 8 * EPS


def test_pairs_of_other_ranks_add_nothing_and_ranks_add_up(rng):
    args = make_inputs(rng, 9, 3, 8, 32, 16, dtype="float32")
    whole, parts = experts(**args), []
    for rank in range(4):
        local = np.full(8, -1, np.int32)
        local[2 * rank : 2 * rank + 2] = 0, 1
        own = {name: args[name][2 * rank : 2 * rank + 2] for name in ("w13", "w2")}
        parts.append(experts(**(args | own), expert_map=jnp.asarray(local)))
    assert np.abs(np.asarray(sum(parts)) - np.asarray(whole)).max() <= 4 * EPS * np.abs(np.asarray(whole)).max()


def test_bc67_a_token_does_not_depend_on_its_neighbours(rng):
    ways: tuple[dict[str, Any], ...] = ({}, {"format": "fp8_block"}, {"format": "mxfp4", "act_group": 32})
    for options in ways:
        args = make_inputs(rng, 6, 2, 4, 128, 128, **options)
        alone = args | {name: args[name][3:4] for name in ("x", "weights", "ids")}
        np.testing.assert_array_equal(experts(**args)[3:4], experts(**alone))


def test_both_places_of_the_weight_agree_beyond_quantization(rng):
    args = make_inputs(rng, 9, 2, 4, 64, 64, dtype="float32", bias=True, limit=2.0)
    a, b = experts(**args), experts(**args, weight_on="activation")
    assert np.abs(a - b).max() <= 32 * EPS * np.abs(a).max()
    args = make_inputs(rng, 9, 2, 4, 64, 64, format="mxfp4", act_group=32)
    a, b = experts(**args), experts(**args, weight_on="activation")
    assert (np.asarray(a) != np.asarray(b)).any(), "the second quantization sees other numbers"


def test_weights_in_fp4_are_exact_in_bfloat16(rng):
    """Weight-only use equals the unquantized op on the dequantized weights, to the bit."""
    from jaxattn.quant import mx

    args = make_inputs(rng, 9, 2, 4, 64, 64, format="mxfp4")
    plain = {name: args[name] for name in ("x", "weights", "ids")}
    plain |= {name: mx.dequantize(args[name], args[f"{name}_scale"], dtype="bfloat16") for name in ("w13", "w2")}
    np.testing.assert_array_equal(experts(**args), experts(**plain))


def test_scales_of_activations_are_powers_of_two_unless_told_otherwise(rng):
    args = make_inputs(rng, 9, 2, 4, 128, 128, format="fp8_block")
    a, b = experts(**args), experts(**args, ue8m0=False)
    assert (np.asarray(a) != np.asarray(b)).any()
    for o in (a, b):
        assert error(o, args) < 0.06


@pytest.mark.parametrize("limit", [None, 10.0])
def test_the_stages_of_megamoe_are_the_experts(limit, rng):
    args = make_inputs(rng, 9, 3, 4, 64, 64, format="mxfp4", limit=limit)
    o = experts(**args, act_group=32, weight_on="activation")
    del args["format"]
    staged = megamoe_staged(**args)
    np.testing.assert_array_equal(np.float32(o), np.float32(staged[0]))


def test_the_clamp_leaves_gates_far_below_alone(rng):
    args = make_inputs(rng, 3, 1, 2, 32, 16, dtype="float32")
    w13 = args["w13"].at[:, :16].set(-jnp.abs(args["w13"][:, :16]) * 4)
    args |= {"w13": w13, "x": jnp.abs(args["x"])}
    assert np.isfinite(np.asarray(experts(**args, limit=10.0))).all()
    assert error(experts(**args, limit=10.0), args | {"limit": 10.0}) < 64 * EPS


def test_new_routings_do_not_recompile(rng):
    args, count = make_inputs(rng, 5, 2, 4, 32, 16, dtype="float32"), 0

    @jax.jit
    def call(ids):
        nonlocal count
        count += 1
        return experts(**(args | {"ids": ids}))

    for _ in range(3):
        call(jnp.asarray(rng.integers(0, 4, (5, 2)), jnp.int32))
    assert count == 1


def test_the_probe_of_a_benchmark_is_part_of_the_whole(rng):
    args = MECHANISM.prepare(**make_inputs(rng, 7, 2, 5, 32, 16, dtype="float32", bias=True))
    assert MECHANISM.probe is not None
    fewer, rows = MECHANISM.probe(rng, **args)
    assert len(fewer["w13"]) == len(fewer["w2_bias"]) == len(np.unique(np.asarray(args["ids"])[rows])) < 6
    assert fewer["x"].shape[0] == len(rows) == 3
    np.testing.assert_array_equal(MECHANISM.reference(**fewer), MECHANISM.reference(**args)[rows])


# ---------------------------------------------------------------- the kernel
def kernel(args, **config):
    """The op by its kernel: on the GPU if there is one, else interpreted."""
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        config = mosaic.Config(**config) if config else None
        return np.asarray(jax.jit(lambda: experts(**args, implementation="mosaic", config=config))())


def steps_apart(a, b):
    """Share of results that differ; more than one step of bfloat16 apart fails."""
    steps = np.abs(np.asarray(a).view(np.int16).astype(int) - np.asarray(b).view(np.int16).astype(int))
    large = np.abs(np.float32(b)) > np.abs(np.float32(b)).max() / 64  # elsewhere sums cancel
    assert steps[large].max(initial=0) <= 2
    return (steps > 0).mean()


@pytest.mark.parametrize(
    ("T", "config", "options"),
    [
        (9, {"shared": True, "multipliers": 1, "half": 64, "stages": 3}, {}),
        (7, {"shared": True, "multipliers": 1, "half": 64, "stages": 3}, {"activation": "swigluoai", "bias": True}),
        (70, {"multipliers": 1, "half": 64, "stages": 2}, {"weight_on": "activation", "bias": True}),
        (150, {"multipliers": 2, "half": 64, "stages": 3}, {"limit": 1.0}),
        (40, {"multipliers": 2, "half": 64, "stages": 3}, {"mapped": True}),
        (70, {"multipliers": 2, "half": 64, "stages": 3}, {"format": "fp8_block", "weight_on": "activation"}),
        (70, {"multipliers": 1, "half": 64, "stages": 3}, {"format": "int8"}),
        (9, {"shared": True, "multipliers": 1, "half": 64}, {"bias": True, "M": 192, "F": 192}),
    ],
)
def test_every_path_of_the_kernel(T, config, options, rng):
    M, F = options.get("M", 128), options.get("F", 128)
    args = make_inputs(rng, T, 2, 3, M, F, **{k: v for k, v in options.items() if k not in "MF"})
    assert steps_apart(kernel(args, **config), experts(**args, implementation="reference")) < 1 / 100


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"multipliers": 2}, {}),
        ({"multipliers": 2}, {"format": "fp8_block"}),
        ({"multipliers": 2, "half": 128, "encode": True}, {"format": "fp8_block"}),
        ({"multipliers": 1, "shared": True}, {}),
    ],
)
def test_the_shortest_ring_ends_where_a_thread_block_has_several_tiles(config, options, rng, monkeypatch):
    """Nobody may wait for a slot that is only freed behind a step that waits for them."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args = make_inputs(rng, 9, 2, 3, 384 if config.get("half", 64) == 64 else 512, 128, **options)
    found = kernel(args, **{"half": 64, "stages": 2} | config)
    assert steps_apart(found, experts(**args, implementation="reference")) < 1 / 100


def test_a_token_that_chose_an_expert_twice_gets_both_weights(rng):
    args = make_inputs(rng, 5, 2, 3, 128, 64)
    args["ids"] = args["ids"].at[:, 1].set(args["ids"][:, 0])
    expected = experts(**args, implementation="reference")
    for config in ({"shared": True, "multipliers": 1, "half": 64}, {"multipliers": 1, "half": 64}):
        assert np.abs(np.float32(kernel(args, **config)) - np.float32(expected)).max() <= 2**-7 * np.abs(expected).max()


def test_bc57_the_kernel_is_repeatable_and_batches_do_not_matter(rng):
    args = make_inputs(rng, 9, 2, 4, 128, 64)
    first = kernel(args)
    np.testing.assert_array_equal(first.view(np.int16), kernel(args).view(np.int16))
    alone = args | {name: args[name][3:4] for name in ("x", "weights", "ids")}
    np.testing.assert_array_equal(first[3:4].view(np.int16), kernel(alone).view(np.int16))
    apart = kernel(args, multipliers=1, half=64, stages=3)
    np.testing.assert_array_equal(first.view(np.int16), apart.view(np.int16))


@pytest.mark.parametrize(
    ("rows", "lowest", "how"), [(5, -33, {}), (64, -33, {}), (5, -22, {"group": 32, "rule": "deep_gemm"})]
)
def test_codes_of_rows_are_those_of_the_quantizer(rows, lowest, how, rng):
    x = rng.standard_normal((rows, 384)).astype(np.float32)
    x[0], x[1, :128], x[2, 5] = 0, 448 * 2.0**-9, 3e4
    x[3, 130:132] = 448, 450
    x = jnp.asarray(x * np.exp2(rng.integers(-20, 20, (rows, 1))), jnp.bfloat16)
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        q, s = (np.asarray(a) for a in _row_copies.encode(x, lowest, how.get("group", 128)))
    expected = fp8.quantize(x, "group", ue8m0=True, **how)
    np.testing.assert_array_equal(s.T, expected[1])
    np.testing.assert_array_equal(q.view(np.uint8), np.asarray(expected[0]).view(np.uint8))


def test_rows_of_any_length_are_copied_and_added(rng):
    """2880 is gpt-oss' size: three pieces, of which the last two overlap."""
    source = jnp.asarray([3, 0, 4, 4], jnp.int32)
    positions = jnp.asarray([[0, 4], [2, -1], [-1, -1]], jnp.int32)
    for width, dtype in ((2880, "bfloat16"), (192, "float16"), (256, "bfloat16")):
        x = jnp.asarray(rng.standard_normal((5, width)), dtype)
        wanted = [x[0].astype("float32") + x[4].astype("float32"), x[2].astype("float32"), jnp.zeros(width)]
        with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
            rows, sums = jax.jit(_row_copies.take)(x, source), jax.jit(_row_copies.add)(x, positions)
        np.testing.assert_array_equal(rows, x[source])
        np.testing.assert_array_equal(sums, jnp.stack(wanted).astype(dtype))


def test_paths_are_chosen_from_shapes_alone():
    def chosen(T, E=64, **options):
        c = mosaic.default_config(
            **(struct(T, 6, E, 4096, 2048, **options) | {"format": options.get("format", "none")})
        )
        return c.shared, c.multipliers, c.half

    assert chosen(1) == chosen(64) == (True, 1, 64)
    assert chosen(256) == (False, 1, 128)
    assert chosen(4096) == (False, 2, 128)
    assert chosen(4096, format="fp8_block") == (False, 2, 128)
    assert chosen(256, 256, format="fp8_block") == (False, 1, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"half": 96}, "half must be 64 or 128, got 96"),
        ({"multipliers": 3}, "multipliers must be 1 or 2, got 3"),
        ({"stages": 1}, "stages must lie between 2 and 12, got 1"),
        ({"shared": True, "multipliers": 2}, "shared rows need one warpgroup that multiplies, got multipliers=2"),
    ],
)
def test_an_illegal_configuration_cannot_be_built(config, message):
    with pytest.raises(ValueError, match=message):
        mosaic.Config(**config)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"half": 128}, "half=128 needs F in multiples of 128 and M of 256, got F=64 and M=128"),
        ({"T": 65}, {"shared": True, "multipliers": 1, "half": 64}, "shared rows are for at most 64 tokens, got T=65"),
        ({}, {"half": 64, "stages": 12}, "needs .* bytes of shared memory, more than 232448; use fewer stages"),
        (
            {"format": "fp8_block", "F": 128},
            {"half": 64, "encode": True},
            "encode=True needs half=128 and format='fp8_block' with ue8m0=True, got half=64 and 'fp8_block'",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(options, config, message, rng):
    sizes = {"T": 5, "M": 128, "F": 64} | {name: options.pop(name) for name in ("T", "M", "F") if name in options}
    args = make_inputs(rng, sizes["T"], 2, 3, sizes["M"], sizes["F"], **options)
    with pytest.raises(ValueError, match=message):
        kernel(args, **config)


def test_the_configurations_for_tuning_are_legal():
    for format in ("none", "fp8_block", "int8"):
        args: dict[str, Any] = struct(64, 6, 8, 4096, 2048, format=format) | {"format": format}
        found = list(mosaic.configs(**args))
        assert mosaic.default_config(**args) in found
        assert all(mosaic._illegal(c, 64, 4096, 2048, format) is None for c in found)


def arguments(**changes) -> dict[str, Any]:
    base = {
        "x": jnp.zeros((3, 64)),
        "w13": jnp.zeros((2, 64, 64)),
        "w2": jnp.zeros((2, 64, 32)),
        "weights": jnp.zeros((3, 2)),
        "ids": jnp.zeros((3, 2), jnp.int32),
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "fp6"}, ValueError, "format must be one of none, fp8_tensor, .* got 'fp6'"),
        ({"weight_on": "input"}, ValueError, "weight_on must be one of output, activation, got 'input'"),
        (
            {"w13": jnp.zeros((2, 63, 64))},
            ValueError,
            r"w13 must hold gate and up rows of at least one expert, got shape",
        ),
        (
            {"w2": jnp.zeros((3, 64, 32))},
            ValueError,
            r"w2 must be \[E N L\] with E=2 \(from w13\), got shape \(3, 64, 32\)",
        ),
        (
            {"w2": jnp.zeros((2, 64, 16))},
            ValueError,
            r"w2 of format 'none' must be \(2, 64, 32\), got shape \(2, 64, 16\)",
        ),
        ({"w13": jnp.zeros((2, 64, 64), jnp.bfloat16)}, TypeError, "w13 must have dtype float32, got bfloat16"),
        ({"ids": jnp.zeros((3, 2))}, TypeError, "ids must have dtype int32, got float32"),
        ({"weights": jnp.zeros((3, 2), jnp.bfloat16)}, TypeError, "weights must have dtype float32, got bfloat16"),
        ({"w13_scale": jnp.zeros(2)}, ValueError, "format 'none' knows no w13_scale; leave it out"),
        ({"act_group": 32}, ValueError, "act_group of format 'none' must be None, got 32"),
        (
            {"w13_bias": jnp.zeros((2, 32))},
            ValueError,
            r"w13_bias of format 'none' must be \(2, 64\), got shape \(2, 32\)",
        ),
        ({"limit": -1.0}, ValueError, "limit must be positive and finite or None, got -1.0"),
        (
            {"format": "int8", "w13": jnp.zeros((2, 64, 64), jnp.int8), "w2": jnp.zeros((2, 64, 32), jnp.int8)},
            ValueError,
            "format 'int8' needs w13_scale; pass it",
        ),
        (
            {"format": "wna16", "w13": jnp.zeros((2, 64, 32), jnp.uint8), "w13_scale": jnp.zeros((2, 64, 3))},
            ValueError,
            r"w13_scale must be \(2, 64, groups\) with groups of a multiple of 8 out of 64 numbers, got shape",
        ),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        experts(**arguments(**changes))
