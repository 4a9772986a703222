"""What the TurboQuant mechanisms share: a check, test cases and support rows; what must not be read is poisoned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case
from jaxattn.quant import turboquant


def check_preset(op: str, preset: str, D: int, slot: int) -> turboquant.Preset:
    """The preset of that name.

    Raises:
        ValueError: there is none, D does not suit, or slots have another size.
    """
    try:
        how = turboquant.find(preset, D)
    except ValueError as e:
        raise ValueError(f"{op}: {e}") from e
    if slot != how.slot_bytes(D):
        raise ValueError(
            f"{op}: slots of preset {preset} with D={D} have {how.slot_bytes(D)} bytes, got {slot} (last dimension of "
            "pages)"
        )
    return how


# ---------------------------------------------------------------- attention
def attention_inputs(
    rng: np.random.Generator,
    query_lengths: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    preset: str = "4bit_nc",
    H: int = 8,
    K: int = 2,
    D: int = 64,
    page: int = 16,
    dtype: str = "bfloat16",
    padding: int = 0,
    before: bool = False,
    drawn: bool = False,
    **options: Any,
) -> Args:
    """Random arguments of `turboquant_attention` with shuffled pages; what must not be read is 0xff or out of range.

    A slot of 0xff has NaN for its norm, scale and minimum, and NaN codes as e4m3 keys.

    Args:
        rng: source of randomness.
        query_lengths: new tokens of each request.
        lengths: valid keys of each request.
        preset: of the cache.
        H: query heads.
        K: kv heads.
        D: head dim.
        page: slots per page.
        dtype: of q.
        padding: rows of q behind the last request, NaN.
        before: `stored` hides each second request's own tokens.
        drawn: draw the codes, as for random normal keys and values, instead of quantizing; for large caches.
        **options: passed on to the op.
    """
    B, pages = len(lengths), max(1, max(-(-n // page) for n in lengths))
    pool = B * pages + 3
    start = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    table = rng.permutation(pool)[: B * pages].reshape(B, pages).astype(np.int32)
    owned = np.zeros((pool, page), bool)
    stored = np.array(lengths)
    if before:
        stored[1::2] -= np.array(query_lengths)[1::2]
    for b, n in enumerate(lengths):
        slots = np.arange(stored[b] if query_lengths[b] else 0)
        owned[table[b, slots // page], slots % page] = True
        table[b, -(-n // page) :] = 2**31 - 1
    packed = np.full((pool, page, K, turboquant.find(preset, D).slot_bytes(D)), 0xFF, np.uint8)
    if drawn:
        packed[owned] = _drawn(rng, int(owned.sum()), K, D, preset)
    else:
        key, value = (rng.standard_normal((int(owned.sum()), K, D)).astype(np.float32) for _ in range(2))
        packed[owned] = np.asarray(jax.jit(turboquant.quantize, static_argnums=2)(key, value, preset))
    q = rng.standard_normal((int(start[-1]) + padding, H, D)).astype(np.float32)
    q[int(start[-1]) :] = np.nan
    options |= {"stored": jnp.asarray(stored, jnp.int32)} if before else {}
    return {
        "q": jnp.asarray(q, dtype),
        "pages": jnp.asarray(packed),
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.asarray(start),
        "preset": preset,
        **options,
    }


def _drawn(rng: np.random.Generator, count: int, K: int, D: int, preset: str) -> np.ndarray:
    """Random slots `[count, K, slot]`; e4m3 keys are below 2 in magnitude."""
    how = turboquant.PRESETS[preset]
    slots = rng.integers(0, 256, (count, K, how.slot_bytes(D)), np.uint8)
    at = how.key_bytes(D)
    if how.key_bits == 8:
        slots[..., :at] &= 0xBF
    numbers = {} if how.key_bits == 8 else {at: (0.8 * D**0.5, 1.2 * D**0.5)}
    end = how.value_offset(D) + how.value_bytes(D)
    numbers |= {end: (4.5 / 2**how.value_bits, 5.5 / 2**how.value_bits), end + 2: (-2.7, -2.2)}
    for place, bounds in numbers.items():
        slots[..., place : place + 2] = rng.uniform(*bounds, (count, K, 1)).astype(np.float16).view(np.uint8)
    return slots


def _attention(name: str, query_lengths, lengths, *tags: str, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: attention_inputs(rng, query_lengths, lengths, **options),
        tags=frozenset(tags or ("smoke",)),
    )


ATTENTION_CASES = (
    _attention("decode-4bit-lens-1-to-full", (1, 1, 1), (1, 64, 130), return_lse=True),
    _attention("decode-k8v4", (1, 1), (40, 77), preset="k8v4", return_lse=True),
    _attention("decode-k3v4-D128", (1, 1), (17, 90), preset="k3v4_nc", D=128, return_lse=True),
    _attention("decode-3bit-D128-page64", (1, 1), (70, 3), preset="3bit_nc", D=128, page=64, return_lse=True),
    _attention("decode-3bit-D256", (1,), (33,), preset="3bit_nc", D=256, H=2, K=1),
    _attention("decode-4bit-D256", (1,), (65,), D=256, H=2, K=2),
    _attention("continuation-3bit", (1, 5, 9), (40, 5, 70), preset="3bit_nc", return_lse=True),
    _attention("stored-before", (2, 5, 3), (40, 5, 70), before=True, return_lse=True),
    _attention("empty-requests-and-padding", (0, 1, 0, 2), (0, 20, 5, 2), padding=3, return_lse=True),
    _attention("gqa6-page128", (1, 2), (130, 30), H=6, K=1, page=128),
    _attention("gqa12", (1,), (33,), H=24, K=2),
    _attention("gqa1-fp16", (1, 1), (65, 30), H=2, K=2, dtype="float16", return_lse=True),
    _attention("fp32", (1, 3, 4), (65, 30, 20), dtype="float32", before=True, return_lse=True),
    *(
        _attention(f"decode-B32-S8192-{preset}", (1,) * 32, (8192,) * 32, "full", "bench", preset=preset, **big)
        for big in ({"H": 32, "K": 8, "D": 128, "page": 64, "drawn": True},)
        for preset in turboquant.PRESETS
    ),
    _attention("prefill-300", (300, 63, 1), (900, 63, 777), "full", H=16, K=4, D=128, page=32, return_lse=True),
)


def _attention_struct(
    preset: str, D: int, page: int = 64, H: int = 32, K: int = 8, dtype: str = "bfloat16", N: int = 8
) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return {
        "q": array((N, H, D), dtype),
        "pages": array((128, page, K, turboquant.find(preset, D).slot_bytes(D)), "uint8"),
        "page_table": array((8, 16), "int32"),
        "lengths": array((8,), "int32"),
        "query_start": array((9,), "int32"),
        "preset": preset,
    }


ATTENTION_SUPPORT = (
    *(
        (f"{preset}, D {D}", _attention_struct(preset, D, K=4 if D == 256 else 8))
        for preset in turboquant.PRESETS
        for D in (64, 128, 256)
    ),
    ("4bit_nc, D 128, page 16", _attention_struct("4bit_nc", 128, 16)),
    ("4bit_nc, D 128, page 128", _attention_struct("4bit_nc", 128, 128)),
    ("4bit_nc, D 128, 64 query rows", _attention_struct("4bit_nc", 128, N=64)),
    ("4bit_nc, D 128, K 16", _attention_struct("4bit_nc", 128, K=16)),
    ("k8v4, D 256, K 8", _attention_struct("k8v4", 256, K=8)),
    ("4bit_nc, D 32", _attention_struct("4bit_nc", 32)),
    ("4bit_nc, D 128, page 8", _attention_struct("4bit_nc", 128, 8)),
    ("4bit_nc, D 128, float16", _attention_struct("4bit_nc", 128, dtype="float16")),
    ("4bit_nc, D 128, float32", _attention_struct("4bit_nc", 128, dtype="float32")),
)


# ---------------------------------------------------------------- writes
def write_inputs(
    rng: np.random.Generator,
    T: int,
    K: int,
    D: int,
    *,
    preset: str = "4bit_nc",
    P: int = 4,
    page: int = 16,
    dtype: str = "bfloat16",
    skipped: float = 0.2,
    outliers: bool = True,
    **options: Any,
) -> Args:
    """Random arguments of `turboquant_write`: shuffled slots, random bytes in the cache, NaN in rows without a slot.

    Args:
        rng: source of randomness.
        T: tokens, at most P * page.
        K: kv heads.
        D: head dim.
        preset: of the cache.
        P: pages.
        page: slots per page.
        dtype: of keys and values.
        skipped: part of the tokens without a slot (-1, -7, or behind the cache).
        outliers: put zeros, constants, tiny and huge numbers into the rows.
        **options: passed on to the op.
    """
    S = P * page
    slots = rng.permutation(S)[:T].astype(np.int32)
    gone = rng.random(T) < skipped
    slots[gone] = rng.choice(np.array([-1, -7, S, 2**31 - 1], np.int32), gone.sum())
    args: Args = {"slots": jnp.asarray(slots), "preset": preset}
    for name in ("key", "value"):
        x = rng.standard_normal((T, K, D)).astype(np.float32)
        if outliers:
            x[0, 0], x[-1, -1, :2] = 0, (3e4, -0.0)
            x[T // 2, 0] = 1.5
            x[T // 3, -1] *= 1e-4
        x[gone] = np.nan
        args[name] = jnp.asarray(x, dtype)
    shape = P, page, K, turboquant.find(preset, D).slot_bytes(D)
    return args | {"pages": jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)} | options


def _write(name: str, T: int, K: int, D: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: write_inputs(rng, T, K, D, **options), tags=frozenset(tags or ("smoke",)))


WRITE_CASES = (
    _write("T9-K2-D64-4bit", 9, 2, 64),
    _write("T5-K8-D128-4bit-page64", 5, 8, 128, page=64, P=2),
    _write("T7-K2-D128-k8v4", 7, 2, 128, preset="k8v4"),
    _write("T6-K3-D128-k3v4-fp16", 6, 3, 128, preset="k3v4_nc", dtype="float16"),
    _write("T9-K1-D256-3bit", 9, 1, 256, preset="3bit_nc"),
    _write("T6-K2-D64-3bit-fp32", 6, 2, 64, preset="3bit_nc", dtype="float32"),
    _write("T5-K4-D128-4bit-fp32", 5, 4, 128, dtype="float32"),
    _write("T1000-K8-D128-3bit", 1000, 8, 128, "full", preset="3bit_nc", P=80),
    *(
        _write(f"T8192-K8-D128-{name}", 8192, 8, 128, "full", "bench", preset=name, P=520, skipped=0.0, outliers=False)
        for name in turboquant.PRESETS
    ),
)


def _write_struct(preset: str, dtype: str, K: int, D: int) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return {
        "key": array((64, K, D), dtype),
        "value": array((64, K, D), dtype),
        "pages": array((128, 64, K, turboquant.find(preset, D).slot_bytes(D)), "uint8"),
        "slots": array((64,), "int32"),
        "preset": preset,
    }


WRITE_SUPPORT = (
    *(
        (f"{preset}, bfloat16, K 8, D {D}", _write_struct(preset, "bfloat16", 8, D))
        for preset in turboquant.PRESETS
        for D in (64, 128, 256)
    ),
    *((f"4bit_nc, {dtype}, K 2, D 128", _write_struct("4bit_nc", dtype, 2, 128)) for dtype in ("float16", "float32")),
    ("4bit_nc, bfloat16, K 1, D 64", _write_struct("4bit_nc", "bfloat16", 1, 64)),
    ("4bit_nc, bfloat16, K 8, D 32", _write_struct("4bit_nc", "bfloat16", 8, 32)),
)
