"""DeepSeek-V4 in its proportions with random weights, and the pieces of a step: what `scripts/bench_model.py` times."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxattn.models import DeepseekV4Config, DeepseekV4ForCausalLM, generation
from jaxattn.models.config import Rope
from jaxattn.models.sampling import Sampling
from jaxattn.nn.moe import MoEConfig
from jaxattn.ops.rms_norm_quant import rms_norm_quant
from scripts._bench import timing

ROOM = 64
"""Tokens that a request has room for behind its context."""
STACKS = {"layer": (4,), "stack": (1, 4, 128, 4)}
SIZES: dict[str, dict[str, Any]] = {
    "flash": {
        "model": {"vocab_size": 129280, "features": 4096, "heads": 64, "q_rank": 1024, "groups": 8, "o_rank": 1024},
        "attention": {"window": 128, "index_heads": 64, "index_dim": 128, "index_topk": 512},
        "experts": {"features": 4096, "experts": 256, "width": 2048, "top_k": 6, "shared_width": 2048},
    },
    "tiny": {
        "model": {"vocab_size": 64, "features": 128, "heads": 4, "q_rank": 128, "groups": 2, "o_rank": 128},
        "attention": {"window": 16, "index_heads": 4, "index_dim": 128, "index_topk": 8},
        "experts": {"features": 128, "experts": 8, "width": 128, "top_k": 2, "shared_width": 128},
    },
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one model in one phase: prefill of one request, or one more token of a batch."""

    what: str
    phase: str
    requests: int
    rows: int
    context: int

    @property
    def capacity(self) -> int:
        """Tokens of a request that the caches have room for."""
        return self.context + ROOM

    def sequences(self, vocab: int) -> np.ndarray:
        """The requests' tokens."""
        return np.random.default_rng(0).integers(0, vocab, (self.requests, self.capacity), np.int32)


class Ready:
    """A step of a model with caches of its own."""

    def __init__(self, model: DeepseekV4ForCausalLM, step: Step):
        """Allocate the caches; the model's chunk becomes that of the step."""
        set_chunk(model, step.rows)
        self.step, self._sequences = step, step.sequences(model.config.vocab_size)
        how: dict[str, Any] = {"how": Sampling(), "stops": jnp.zeros(0, jnp.int32)}
        self.runner = generation.Runner(model, step.requests, step.capacity, **how)
        self._function, more = generation._decode, ()
        if step.phase == "prefill":
            more = next(generation._chunks(self._sequences, np.array([step.context], np.int32), step.rows))
            self._function = generation._prefill
        self._more = self.runner.key, self.runner.stops, *map(jnp.asarray, more)

    def state(self) -> generation.State:
        """Requests that hold as many tokens as their context says."""
        full = jnp.full(self.step.requests, self.step.context, jnp.int32)
        ended = jnp.zeros(self.step.requests, bool)
        return generation.State(jnp.asarray(self._sequences), full, full + 10**6, ended)

    def lower(self) -> Any:
        """The step for these arrays alone: the program that is timed, and whose memory is known."""
        r = self.runner
        return self._function.lower(r.definition, r.weights, r.pages, r.tables, self.state(), *self._more)

    def advance(self, compiled: Any, state: generation.State) -> generation.State:
        """Run the compiled step; `state` is used up."""
        r = self.runner
        r.pages, state = compiled(r.weights, r.pages, r.tables, state, *self._more)
        return state


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a step: a function of arrays."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int | None = None
    """Place of the argument that is updated."""
    ratio: int | None = None
    """Layers of this ratio have it, once each; None = all layers."""
    once: bool = False
    """The model has it once."""

    def count(self, ratios: tuple[int, ...]) -> int:
        """How often a model of layers of these ratios has it."""
        return 1 if self.once else len(ratios) if self.ratio is None else ratios.count(self.ratio)

    def prepared(self) -> tuple[Any, Callable[[Any], tuple[Callable[[], Any], Callable[[], None]]]]:
        """(lowered, runs): `runs(lowered.compile())` is (launch, wait) of one call.

        What is updated is donated and goes into the next call.
        """
        split = [nnx.split(x) if isinstance(x, nnx.Module) else (None, x) for x in self.args]
        states = [state for _, state in split]

        def run(carried, states):
            states = [carried if i == self.carried else x for i, x in enumerate(states)]
            args = [x if d is None else nnx.merge(d, x) for (d, _), x in zip(split, states, strict=True)]
            out = self.function(*args)
            return out, None if self.carried is None else nnx.state(args[self.carried])

        kept = [None if self.carried is None else jax.tree.map(jnp.copy, states[self.carried])]
        rest = [None if i == self.carried else x for i, x in enumerate(states)]

        def runs(compiled):
            last = [None]

            def launch():
                last[0], kept[0] = compiled(kept[0], rest)
                return last[0]

            return launch, lambda: timing.wait_for((last[0], kept[0]))

        return jax.jit(run, donate_argnums=0).lower(kept[0], rest), runs


def config(size: str, ratios: tuple[int, ...], chunk: int, positions: int) -> DeepseekV4Config:
    """A model in V4's proportions: FP8 linears, MXFP4 experts, FP8 caches, no MTP block."""
    s = SIZES[size]
    moe = MoEConfig(
        **s["experts"],
        scoring="sqrtsoftplus",
        correction_bias=True,
        scaling=1.5,
        limit=10.0,
        format="mxfp4",
        act_group=32,
        weight_on="activation",
    )
    rope = {"dim": 64, "length": positions, "mscale": 0.0, "mscale_all_dim": 0.0}
    stretched = Rope(**rope, theta=160000.0, factor=16.0, original=65536)
    return DeepseekV4Config(
        **s["model"],
        **s["attention"],
        ratios=ratios,
        mtp_blocks=0,
        moe=(moe,) * len(ratios),
        window_rope=Rope(**rope),
        rope=stretched,
        linear_format="fp8_block",
        output_format="fp8_block",
        chunk=chunk,
    )


def make(config: DeepseekV4Config, seed: int = 0) -> DeepseekV4ForCausalLM:
    """The model with random numbers of a sensible size, made one variable at a time on the device."""

    def empty():
        return DeepseekV4ForCausalLM(config, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(empty)
    tables = jax.jit(lambda: [rope.table() for rope in (config.window_rope, config.rope)])()
    by_ratio = {layer.attn.ratio > 1: layer.attn.table for layer in model.layers}
    for compressed, variable in by_ratio.items():
        variable.set_value(tables[int(compressed)])
    key = jax.random.key(seed)
    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model))):
        if path[-1] != "table":
            variable.set_value(_fill(jax.random.fold_in(key, i), str(path[-1]), variable.shape, variable.dtype))
    return model


def set_chunk(model: DeepseekV4ForCausalLM, rows: int) -> None:
    """Let a step have so many rows; caches made from now on keep what these can read."""
    model.config = dataclasses.replace(model.config, chunk=max(rows, 64))


def _fill(key, name: str, shape: tuple[int, ...], dtype) -> jax.Array:
    """Numbers of one variable: rows of matrices have norm 1 or so, norms and scales are 1, biases 0."""
    return _filled(key, name, tuple(shape), jnp.dtype(dtype).name)


@jax.jit(static_argnums=(1, 2, 3))
def _filled(key, name, shape, dtype):
    if dtype == "uint8":
        # E2M1 codes of random bits have a root mean square of 2.9
        return jnp.full(shape, 119, dtype) if name.endswith("scale") else jax.random.bits(key, shape, dtype)
    if name in ("weight_scale_inv", "wo_a_scale"):
        return jnp.full(shape, 2.0**-6, dtype)
    if dtype == "float8_e4m3fn" or len(shape) > 1:
        inputs = shape[0] if name in ("kernel", "wkv", "wgate") else shape[-1]
        width = 1.0 if dtype == "float8_e4m3fn" or name == "embedding" else inputs**-0.5
        return (jax.random.normal(key, shape) * width).astype(dtype)
    return jnp.zeros(shape, dtype) if name in ("correction_bias", "attn_sink", "base") else jnp.ones(shape, dtype)


def parts(model: DeepseekV4ForCausalLM, cache: Any, tables: Any, lengths: Any, start: Any, rows: int) -> Iterator[Part]:
    """The pieces of a step of `rows` rows: attention of each ratio, and what all layers have alike."""
    M, C = model.config.features, model.config.streams
    x = jax.random.normal(jax.random.key(1), (rows, M)).astype(jnp.bfloat16)
    streams = jnp.broadcast_to(x[:, None], (rows, C, M))
    eps = model.config.eps

    def attention(layer, pages, x, tables, lengths, start):
        batch = model.make_batch(tables, lengths, start, tokens=rows)
        return layer.attn(rms_norm_quant(x, layer.attn_norm[...], eps=eps), pages, batch[pages.ratio])

    def experts(layer, x):
        return layer.ffn(rms_norm_quant(x, layer.ffn_norm[...], eps=eps))

    def hyper(layer, streams, y):
        x, post, comb = layer.attn_hc.pre(streams)
        x, post, comb, streams = layer.ffn_hc.pre(streams, y=y, post=post, comb=comb)
        return layer.ffn_hc.post(streams, x, post, comb)

    def logits(model, streams):
        return model.logits(streams)

    layers, first = list(zip(model.layers, cache.layers, strict=True)), model.layers[0]
    for ratio in dict.fromkeys(model.config.ratios):
        layer, pages = next(x for x in layers if x[0].attn.ratio == ratio)
        yield Part(f"attn ratio {ratio}", attention, (layer, pages, x, tables, lengths, start), 1, ratio=ratio)
    yield Part("ffn", experts, (first, x))
    yield Part("hyper-connections", hyper, (first, streams, x))
    yield Part("logits", logits, (model, streams[: len(lengths)]), once=True)
