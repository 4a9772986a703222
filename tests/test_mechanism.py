"""The choice of an implementation, on a record made up here so that no kernel is involved."""

import dataclasses
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import _mechanism, registry
from jaxattn._mechanism import Kernel, Mechanism, choose, explain, run


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64


def kernel(name, *, reason=None, here=None):
    """A kernel that returns its name and the config it ran with."""
    return Kernel(
        run=lambda *, config, x, **_: (name, config, x),
        why_not=lambda *, x, **_: reason if reason else None if x.shape[0] % 8 == 0 else f"needs 8 | N, got {x.shape}",
        why_not_here=lambda: here,
        default_config=lambda **_: Config(),
        configs=lambda **_: (Config(), Config(128)),
    )


def mechanism(kernels, grads=("x",)):
    def prepare(x, *, factor=None):
        if x.ndim != 1:
            raise ValueError(f"toy: x must have 1 dimension, got {x.ndim}")
        return {"x": x, "factor": 2.0 if factor is None else float(factor)}

    return Mechanism(
        name="toy",
        source="here",
        op=lambda x, *, implementation=None, config=None, factor=None: run(
            toy, prepare(x, factor=factor), implementation, config
        ),
        prepare=prepare,
        reference=lambda *, x, factor: ("reference", None, x * factor),
        outputs=lambda **_: ("name", "config", "o"),
        kernels=kernels,
        cases=(),
        cost=lambda *, x, **_: (x.size, 0),
        grads=grads,
    )


toy = mechanism(
    {
        "mosaic": kernel("mosaic", here="needs an sm_90a GPU, but this process runs on cpu"),
        "triton": kernel("triton"),
        "never": kernel("never", reason="is not written"),
    }
)
X, ODD = jnp.arange(8.0), jnp.arange(7.0)


# ---------------------------------------------------------------- choosing
@pytest.mark.parametrize(
    ("x", "implementation", "expected"),
    [
        (X, None, "triton"),
        (X, "triton", "triton"),
        (X, "reference", "reference"),
        (ODD, None, "reference"),
        (ODD, "reference", "reference"),
    ],
)
def test_choice(x, implementation, expected):
    assert choose(toy, {"x": x}, implementation) == expected
    assert toy.op(x, implementation=implementation)[0] == expected


def test_first_kernel_that_can_run_is_preferred():
    both = mechanism({"first": kernel("first"), "second": kernel("second")})
    assert choose(both, {"x": X}, None) == "first"


def test_unknown_implementation_names_the_nearest():
    message = "toy: implementation must be None or one of reference, mosaic, triton, never, got 'tritn' (did you mean"
    with pytest.raises(ValueError, match=re.escape(f"{message} 'triton'?)")):
        toy.op(X, implementation="tritn")


@pytest.mark.parametrize("implementation", ["gpu", "", 3])
def test_unknown_implementation_without_a_near_match(implementation):
    with pytest.raises(ValueError, match=re.escape(f"got {implementation!r}") + "$"):
        toy.op(X, implementation=implementation)


@pytest.mark.parametrize(
    ("x", "implementation", "reason"),
    [
        (X, "mosaic", "needs an sm_90a GPU, but this process runs on cpu"),
        (ODD, "mosaic", "needs 8 | N, got (7,)"),  # the shape is wrong everywhere, the device only here
        (ODD, "triton", "needs 8 | N, got (7,)"),
        (X, "never", "is not written"),
    ],
)
def test_explicit_request_raises_with_the_reason(x, implementation, reason):
    message = f"toy: implementation={implementation!r} cannot run this call: {reason}"
    with pytest.raises(NotImplementedError, match=re.escape(message) + "$"):
        toy.op(x, implementation=implementation)


def test_a_crash_in_a_kernel_is_no_fallback():
    def crash(**_):
        raise RuntimeError("kernel broke")

    broken = mechanism({"mosaic": dataclasses.replace(kernel("mosaic"), run=crash)})
    with pytest.raises(RuntimeError, match="kernel broke"):
        run(broken, {"x": X, "factor": 1.0}, None)


# ---------------------------------------------------------------- config
def test_config_precedence():
    assert toy.op(X)[1] == Config()
    assert toy.op(X, config=Config(128))[1] == Config(128)


@pytest.mark.parametrize("implementation", ["reference", None])
def test_config_for_the_reference_raises(implementation):
    message = (
        "toy: a config belongs to a kernel, but the reference would run; name the kernel with implementation= "
        "(one of mosaic, triton, never)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        toy.op(ODD, implementation=implementation, config=Config())


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradient_through_an_inference_only_kernel_raises(wrap):
    inference = mechanism({"mosaic": kernel("mosaic")}, grads=())

    def loss(x, implementation):
        return run(inference, {"x": x, "factor": 3.0}, implementation)[2].sum()

    message = "toy: the mosaic kernel is inference only; for gradients use implementation='reference'"
    kernels = dataclasses.replace(inference.kernels["mosaic"], run=lambda *, config, x, factor: (0, 0, x * factor))
    inference = dataclasses.replace(inference, kernels={"mosaic": kernels})
    assert loss(X, None) == 3 * X.sum()
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        wrap(jax.grad(lambda x: loss(x, None)))(X)
    np.testing.assert_array_equal(wrap(jax.grad(lambda x: loss(x, "reference")))(X), np.full(8, 3.0))


# ---------------------------------------------------------------- one program
def test_equal_calls_of_a_program_share_one_kernel():
    """Lowered once however many layers call it; another shape, option or configuration is another kernel."""
    lowered = []

    def double(*, config, x, factor):
        lowered.append((x.shape, config, factor))
        return x * factor

    kernels = {"mosaic": dataclasses.replace(kernel("mosaic"), run=double)}
    record = mechanism(kernels, grads=())

    def layers(x):
        for _ in range(5):
            x = run(record, {"x": x, "factor": 2.0}, None)
        half = run(record, {"x": x[:8], "factor": 2.0}, None)
        return (
            x,
            half,
            run(record, {"x": x, "factor": 3.0}, None),
            run(record, {"x": x, "factor": 2.0}, None, Config(9)),
        )

    x = jnp.arange(16.0)
    once, half, triple, last = jax.jit(layers)(x)
    assert lowered == [((16,), Config(), 2.0), ((8,), Config(), 2.0), ((16,), Config(), 3.0), ((16,), Config(9), 2.0)]
    for found, factor in ((once, 32), (half, 64), (triple, 96), (last, 64)):
        np.testing.assert_array_equal(found, factor * x[: found.size])
    text = jax.jit(layers).lower(x).as_text()
    assert text.count("call @") == 8 and text.count("func private") == 4


def test_arrays_inside_of_options_keep_kernels_apart():
    """Two tracers look the same, so what holds them is never taken for equal."""

    def add(*, config, x, terms):
        return x + terms[0]

    record = mechanism({"mosaic": dataclasses.replace(kernel("mosaic"), run=add)}, grads=())
    two = jax.jit(lambda x, a, b: tuple(run(record, {"x": x, "terms": (term,)}, None) for term in (a, b)))
    for found, term in zip(two(X, 1 * X, 2 * X), (1, 2), strict=True):
        np.testing.assert_array_equal(found, X + term * X)


def test_another_program_traces_its_kernels_anew():
    """What is patched between two programs counts; calls outside of a program share nothing."""
    seen = []

    def named(*, config, x, factor):
        seen.append(len(seen))
        return x + seen[-1]

    record = mechanism({"mosaic": dataclasses.replace(kernel("mosaic"), run=named)}, grads=())

    def call(x):
        return run(record, {"x": x, "factor": 1.0}, None)

    before = set(_mechanism._traced)
    first, second = jax.jit(call), jax.jit(lambda x: call(x))
    assert [float(f(X)[0]) for f in (first, second, call, call)] == [0, 1, 2, 3]
    assert len(set(_mechanism._traced) - before) == 2
    del first, second, call
    gc.collect()
    assert not set(_mechanism._traced) - before, "kept beyond the program"


# ---------------------------------------------------------------- explaining
def test_explain_names_every_implementation():
    explanation = explain(toy, x=X)
    assert explanation.chosen == "triton"
    assert dict(explanation.reasons) == {
        "mosaic": "needs an sm_90a GPU, but this process runs on cpu",
        "triton": None,
        "never": "is not written",
        "reference": None,
    }
    assert str(explanation).splitlines() == [
        "toy:",
        "  mosaic     needs an sm_90a GPU, but this process runs on cpu",
        "  triton     chosen",
        "  never      is not written",
        "  reference  available",
    ]


def test_explain_on_target_leaves_this_machine_out():
    assert explain(toy, on_target=True, x=X).chosen == "mosaic"
    assert explain(toy, on_target=True, x=ODD).chosen == "reference"


def test_explain_checks_like_the_op():
    with pytest.raises(ValueError, match="toy: x must have 1 dimension, got 2"):
        explain(toy, x=jax.ShapeDtypeStruct((2, 2), jnp.float32))


@pytest.mark.parametrize("record", registry.MECHANISMS, ids=lambda m: m.name)
def test_explain_needs_shapes_only(record):
    for label, args in record.support:
        for on_target in (False, True):
            explanation = jaxattn.explain(record.name, on_target=on_target, **args)
            assert set(explanation.reasons) == {*record.kernels, "reference"}, label
            assert explanation.reasons[explanation.chosen] is None, label


@pytest.mark.parametrize("record", registry.MECHANISMS, ids=lambda m: m.name)
def test_explain_agrees_with_the_choice(record):
    for label, args in record.support:
        chosen = jaxattn.explain(record.op, **args).chosen
        assert _mechanism.choose(record, record.prepare(**args), None) == chosen, label


def test_an_unproven_kernel_runs_only_where_it_is_named():
    record = mechanism({"mosaic": dataclasses.replace(kernel("mosaic"), proven=False)})
    assert choose(record, {"x": X, "factor": 1.0}, None) == "reference"
    assert choose(record, {"x": X, "factor": 1.0}, "mosaic") == "mosaic"
    explanation = explain(record, x=X)
    assert explanation.chosen == "reference"
    assert explanation.reasons["mosaic"] == "not proven on a GPU yet; runs only with implementation='mosaic'"


def test_some_arguments_may_be_proven_and_others_not():
    half = dataclasses.replace(kernel("mosaic"), proven=lambda *, factor, **_: factor == 1)
    record = mechanism({"mosaic": half})
    assert choose(record, {"x": X, "factor": 1.0}, None) == "mosaic"
    assert choose(record, {"x": X, "factor": 2.0}, None) == "reference"
    assert choose(record, {"x": X, "factor": 2.0}, "mosaic") == "mosaic"


# ---------------------------------------------------------------- registry
@pytest.mark.parametrize("record", registry.MECHANISMS, ids=lambda m: m.name)
def test_find_by_name_op_and_record(record):
    assert registry.find(record.name) is registry.find(record.op) is registry.find(record) is record


def test_unknown_mechanism_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown mechanism 'paged_atention' \(did you mean 'paged_attention'\?\)"):
        jaxattn.explain("paged_atention")


def test_unknown_mechanism_lists_the_known():
    known = ", ".join(m.name for m in registry.MECHANISMS)
    with pytest.raises(ValueError, match=re.escape(f"unknown mechanism 'zzz'; known: {known}")):
        registry.find("zzz")
