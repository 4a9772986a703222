"""Check bits and measure kernel times of merge_states, combine_partials and cache_write on a Hopper GPU.

    PYTHONPATH=. OUT=/some/folder python dev/ops_bench.py [--captures DIR] [--no-peer] [--tiny]

Kernels are compared with the references on the CPU (JAX_PLATFORMS must not hide it), then timed with CUPTI on rotated
inputs that do not fit the L2 cache. vLLM's ops, where they can be imported (`vllm_env` on the path), are timed as CUDA
graphs over rotated inputs, and their bytes compared with ours. Writes `ops_bench.json` into $OUT. `--tiny` only tries
the script on a CPU.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import traceback
import zlib
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxattn import _kv_quant, cache_write, combine_partials, merge_states, registry
from jaxattn.ops import cache_write as cw
from jaxattn.ops import combine_partials as cp
from jaxattn.ops import merge_states as ms
from pallas_kernels import _exact, _mosaic

COPY_RATE = 4.3e12
STEMS = ("merge_states", "combine_partials", "cache_write")
RESULTS: dict = {"checks": [], "times": [], "peers": [], "errors": []}


def bits(x):
    x = np.ascontiguousarray(np.asarray(x))
    return x.view(f"u{x.dtype.itemsize}")


def differing(a, b):
    """Elements whose bits differ, and the largest distance between neighbours in the dtype's order."""
    a, b = bits(a), bits(b)
    wrong = a != b
    top = np.int64(1) << (8 * a.dtype.itemsize - 1)

    def order(x):
        x = x.astype(np.int64)
        return np.where(x & top, top - x, x)

    far = int(np.abs(order(a) - order(b))[wrong].max(initial=0))
    return int(wrong.sum()), far, int(a.size)


def note(kind, **record):
    RESULTS[kind].append(record)
    print(kind, json.dumps(record), flush=True)


def guarded(f):
    def run(*args, **kw):
        try:
            return f(*args, **kw)
        except Exception as e:
            traceback.print_exc()
            note("errors", where=f.__name__, error=f"{type(e).__name__}: {e}"[:500])

    return run


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def split(args):
    arrays = {k: jnp.asarray(v) for k, v in args.items() if hasattr(v, "shape")}
    return arrays, {k: v for k, v in args.items() if k not in arrays}


def on_cpu(op, args):
    arrays, static = split(args)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices("cpu")[0]), arrays)
        return as_tuple(jax.jit(lambda a: op(**a, **static, implementation="reference"))(arrays))


def on_device(op, args, implementation, config=None):
    arrays, static = split(args)
    return as_tuple(jax.jit(lambda a: op(**a, **static, implementation=implementation, config=config))(arrays))


# ---------------------------------------------------------------- bits
@guarded
def check_division():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1 << 20) * 10.0 ** rng.integers(-6, 6, 1 << 20)).astype(np.float32)
    for y in (np.float32(0.03), np.float32(448), np.float32(127), rng.standard_normal(1 << 20).astype(np.float32)):
        wrong = int((bits(jax.jit(_exact.divide)(x, y)) != bits(x / y)).sum())
        note("checks", what="_exact.divide on this device", by=str(np.ravel(y)[0]), differ=wrong, of=x.size)


@guarded
def check_case(mechanism, case):
    args = case.make(np.random.default_rng(zlib.crc32(case.name.encode())))
    reason = mechanism.kernels["mosaic"].why_not(**mechanism.prepare(**args))
    if reason:
        return
    names = mechanism.outputs(**mechanism.prepare(**args))
    expected = on_cpu(mechanism.op, args)
    for name, a, b in zip(names, on_device(mechanism.op, args, "mosaic"), expected, strict=True):
        wrong, far, size = differing(a, b)
        note(
            "checks",
            what=f"{mechanism.name}/{case.name}/{name}: kernel vs reference on the CPU",
            differ=wrong,
            far=far,
            of=size,
        )
    for name, a, b in zip(names, on_device(mechanism.op, args, "reference"), expected, strict=True):
        wrong, far, size = differing(a, b)
        if wrong:
            note(
                "checks",
                what=f"{mechanism.name}/{case.name}/{name}: reference here vs on the CPU",
                differ=wrong,
                far=far,
                of=size,
            )


@guarded
def check_remainders():
    """Tiles, shorter tiles and slivers by TMA, for all row lengths."""
    worst = 0
    rng = np.random.default_rng(1)
    for D in (8, 40, 64, 80, 128, 192, 256):
        for T in (1, 2, 7, 33):
            args = ms.make_inputs(rng, T, 5, D)
            for a, b in zip(on_device(merge_states, args, "mosaic"), on_cpu(merge_states, args), strict=True):
                worst = max(worst, differing(a, b)[1])
    note("checks", what="merge_states, remainders of rows", far=worst)


@guarded
def check_captures(folder):
    from parity import captures

    x = {}
    for capture in captures.load([Path(folder)]):
        if capture.family == "attention":
            x |= {f"{capture.case}/in.{n}": jnp.asarray(np.asarray(v)) for n, v in capture.inputs.items()}
            x |= {f"{capture.case}/out.{n}": np.asarray(v) for n, v in capture.outputs.items()}
    for case in ("plain", "prefix", "suffix"):
        c = {k.split("/")[1]: v for k, v in x.items() if k.startswith(f"merge_states_{case}/")}
        args = {"prefix_o": c["in.prefix_o"], "prefix_lse": c["in.prefix_lse"].T}
        args |= {"suffix_o": c["in.suffix_o"], "suffix_lse": c["in.suffix_lse"].T}
        o, lse = on_device(merge_states, args, "mosaic")
        note(
            "checks",
            what=f"capture merge_states_{case}",
            o=differing(o, c["out.o"]),
            lse=differing(lse, c["out.lse"].T),
        )
    c = {k.split("/")[1]: v for k, v in x.items() if k.startswith("dcp_combine/")}
    args = {"o": c["in.partial_o"], "lse": c["in.partial_lse"], "return_corrected": True}
    _, lse, corrected = on_device(combine_partials, args, "mosaic")
    note(
        "checks",
        what="capture dcp_combine",
        corrected=differing(corrected, c["out.corrected_o"]),
        lse=differing(lse, c["out.lse"]),
    )
    for case in ("bf16", "fp8"):
        c = {k.split("/")[1]: v for k, v in x.items() if k.startswith(f"cache_write_{case}/")}
        dtype = jnp.bfloat16 if case == "bf16" else jnp.float8_e4m3fn
        zeros = jnp.zeros(c["out.k_cache"].shape, dtype)
        args = {"key": c["in.key"], "value": c["in.value"], "k_pages": zeros, "v_pages": zeros}
        args["slots"] = jnp.asarray(np.asarray(c["in.slot_mapping"]), jnp.int32)
        args |= {"k_scale": c["in.k_scale"], "v_scale": c["in.v_scale"]} if case == "fp8" else {}
        k, v = on_device(cache_write, args, "mosaic")
        note(
            "checks",
            what=f"capture cache_write_{case}",
            k=differing(k, c["out.k_cache"]),
            v=differing(v, c["out.v_cache"]),
        )


# ---------------------------------------------------------------- our times
def kernel_times(op, sets, name, config, iterations=12):
    """Microseconds of each launch of the kernel `name`, and of everything else, per call."""
    from jax.experimental.mosaic.gpu import profiler

    arrays = [split(s)[0] for s in sets]
    static = split(sets[0])[1]
    fn = jax.jit(lambda xs: [op(**x, **static, implementation="mosaic", config=config) for x in xs])
    _, runs = profiler.measure(fn, aggregate=False, iterations=iterations)(arrays)
    ours = [1e3 * ms for run in runs for kernel, ms in run if name in kernel]
    other = sum(1e3 * ms for run in runs for kernel, ms in run if name not in kernel)
    return ours, other / (iterations * len(sets))


@guarded
def time_op(mechanism, label, sets):
    prepared = mechanism.prepare(**sets[0])
    kernel = mechanism.kernels["mosaic"]
    _, moved = mechanism.cost(**prepared)
    default = kernel.default_config(**prepared)
    for config in {default: None} | dict.fromkeys(kernel.configs(**prepared)):
        try:
            ours, other = kernel_times(mechanism.op, sets, mechanism.name, config)
        except Exception as e:
            note("errors", where=f"{label} {config}", error=f"{type(e).__name__}: {e}"[:300])
            continue
        median = statistics.median(ours)
        deciles = statistics.quantiles(ours, n=10)
        note(
            "times",
            mechanism=mechanism.name,
            case=label,
            config=str(config),
            default=config == default,
            median_us=round(median, 2),
            p10_us=round(deciles[0], 2),
            p90_us=round(deciles[-1], 2),
            other_us=round(other, 2),
            tbps=round(moved / median / 1e6, 3),
            roofline=round(moved / COPY_RATE * 1e6 / median, 3),
            bytes=moved,
        )


@guarded
def time_copy():
    """What the card copies, for scale: 1.5 GiB read and written by one XLA kernel."""
    from jax.experimental.mosaic.gpu import profiler

    x = jax.random.normal(jax.random.key(0), (768 << 20,), jnp.bfloat16)
    _, runs = profiler.measure(jax.jit(lambda x: -x), aggregate=True, iterations=10)(x)
    note(
        "times",
        mechanism="copy",
        case="negate 1.5 GiB of bfloat16",
        median_us=1e3 * statistics.median(runs),
        tbps=2 * x.nbytes / statistics.median(runs) / 1e9,
    )


# ---------------------------------------------------------------- vLLM beside us
def graph_us(calls, rounds=20):
    """Median microseconds of one call, from a CUDA graph that holds all of `calls` in turn."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return {"median_us": round(statistics.median(times), 2), "min_us": round(min(times), 2)}


def to_torch(x):
    import torch

    x = np.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).cuda()
    return torch.from_numpy(np.array(x)).cuda()


def from_torch(x):
    import torch

    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).cpu().numpy()
    return x.cpu().numpy()


@guarded
def peer_merge(sets):
    import torch
    from vllm import _custom_ops as ops

    calls, outputs = [], []
    for s in sets:
        po, so = to_torch(s["prefix_o"]), to_torch(s["suffix_o"])
        pl, sl = (to_torch(s[n]).T.contiguous() for n in ("prefix_lse", "suffix_lse"))
        o, lse = torch.empty_like(po), torch.empty_like(pl)
        outputs.append((o, lse))
        calls.append(lambda o=o, po=po, pl=pl, so=so, sl=sl, lse=lse: ops.merge_attn_states(o, po, pl, so, sl, lse))
    note("peers", mechanism="merge_states", peer="vllm merge_attn_states", **graph_us(calls * 4))
    o, lse = on_device(merge_states, sets[0], "mosaic")
    note(
        "checks",
        what="merge_states vs vLLM, same inputs",
        o=differing(o, from_torch(outputs[0][0])),
        lse=differing(lse, from_torch(outputs[0][1]).T),
    )


@guarded
def peer_combine(sets):
    from vllm.v1.attention.ops.common import CPTritonContext, correct_attn_out

    calls, context = [], CPTritonContext()
    for s in sets:
        o, lse = to_torch(s["o"]), to_torch(s["lse"])

        def call(o=o, lse=lse):
            for rank in range(len(o)):
                correct_attn_out(o[rank], lse, rank, context)
            return o.sum(0)

        calls.append(call)
    note(
        "peers",
        mechanism="combine_partials",
        peer="vllm correct_attn_out for every rank in place, torch sum",
        **graph_us(calls * 4),
    )


@guarded
def peer_cache(sets, kind):
    import torch
    from vllm import _custom_ops as ops

    calls, outputs = [], []
    for s in sets:
        key, value, kc, vc = (to_torch(s[n]) for n in ("key", "value", "k_pages", "v_pages"))
        slots = to_torch(s["slots"]).to(torch.int64)
        ks, vs = (torch.tensor([float(s.get(n, 1.0))], device="cuda") for n in ("k_scale", "v_scale"))
        outputs.append((kc, vc))
        calls.append(lambda a=(key, value, kc, vc, slots, kind, ks, vs): ops.reshape_and_cache_flash(*a))
    note("peers", mechanism="cache_write", peer=f"vllm reshape_and_cache_flash {kind}", **graph_us(calls * 4))
    ours = on_device(cache_write, sets[0], "mosaic")
    for name, a, b in zip(("k", "v"), ours, outputs[0], strict=True):
        note("checks", what=f"cache_write {kind} {name} vs vLLM, same inputs", differ=differing(a, from_torch(b)))


@guarded
def peer_cache_per_head(sets, stored):
    import torch
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if stored == "int8" else KVQuantMode.FP8_PER_TOKEN_HEAD
    calls, outputs = [], []
    for s in sets:
        key, value, kc, vc, ks, vs = (
            to_torch(s[n]) for n in ("key", "value", "k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
        )
        if stored != "int8":
            kc, vc = kc.view(torch.float8_e4m3fn), vc.view(torch.float8_e4m3fn)
        slots = to_torch(s["slots"]).to(torch.int64)
        outputs.append((kc, vc, ks, vs))
        calls.append(
            lambda a=(key, value, kc, vc, ks, vs, slots, mode): (
                module.triton_reshape_and_cache_flash_per_token_head_quant(*a)
            )
        )
    note("peers", mechanism="cache_write", peer=f"vllm per token and head, {stored}", **graph_us(calls * 4))
    ours = on_device(cache_write, sets[0], "mosaic")
    for name, a, b in zip(("k", "v", "k scales", "v scales"), ours, outputs[0], strict=True):
        note("checks", what=f"cache_write {stored} per head, {name} vs vLLM", differ=differing(a, from_torch(b)))


@guarded
def peer_int4():
    """Signs, rotation and codes of vLLM's int4 mode against ours."""
    import torch
    from vllm.v1.attention.ops import int4_per_token_head as module

    for D in (64, 128):
        theirs = module._get_rht_signs(D, 0, torch.device("cpu")).numpy()
        note("checks", what=f"int4 signs D {D} vs vLLM", differ=int((theirs != _kv_quant._signs(D)).sum()))
    rng = np.random.default_rng(0)
    args = cw.make_inputs(rng, 64, 8, 128, P=8, mode="int4_token_head", skipped=0.0, outliers=False)
    x = to_torch(args["key"])
    rotated = from_torch(module.single_rht(x.float()).to(x.dtype))
    ours = np.asarray(_kv_quant.rotate(args["key"]))
    note("checks", what="int4 rotation vs vLLM", differ=differing(ours, rotated))
    kc, vc, ks, vs = (to_torch(args[n]) for n in ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages"))
    slots = to_torch(args["slots"]).to(torch.int64)
    module.reshape_and_cache_int4(x, x, kc, vc, slots, k_scale_cache=ks, v_scale_cache=vs)
    codes, scales = _kv_quant.per_head_int4(jnp.asarray(rotated))
    where = np.asarray(args["slots"])
    got = from_torch(kc).reshape(-1, 8, 64)[where], from_torch(ks).reshape(-1, 8)[where]
    note(
        "checks",
        what="int4 codes and scales of vLLM's own rotation",
        codes=differing(codes, got[0]),
        scales=differing(scales, got[1]),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--captures")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    rng = np.random.default_rng(0)
    size = (lambda full, tiny: tiny) if options.tiny else (lambda full, tiny: full)
    with _mosaic.interpret() if options.tiny else contextlib.nullcontext():
        check_division()
        for stem in STEMS:
            mechanism = registry.find(stem)
            for case in mechanism.cases if not options.tiny else mechanism.cases[:2]:
                check_case(mechanism, case)
        if options.captures:
            check_captures(options.captures)
        if not options.tiny:
            check_remainders()
    T = size(8192, 4)
    merges = [ms.make_inputs(rng, T, 32, 128, empty=False) for _ in range(3)]
    combines = {
        f"N{n} B{b} H{h} D{d}": [cp.make_inputs(rng, n, b, h, d, empty=False) for _ in range(3)]
        for n, b, h, d in size(((8, 256, 64, 512), (4, 1024, 32, 128), (2, 8, 64, 128)), ((2, 2, 8, 64),))
    }
    modes = ("copy", "fp8", "int8_token_head", "fp8_token_head")
    writes = {
        mode: [
            cw.make_inputs(rng, T, 8, 128, P=T // 16 + 8, page=16, mode=mode, skipped=0.0, outliers=False)
            for _ in range(4)
        ]
        for mode in modes
    }
    small = {
        mode: [cw.make_inputs(rng, 64, 8, 128, P=64, mode=mode, skipped=0.0) for _ in range(4)] for mode in modes[:2]
    }
    if not options.tiny:
        time_copy()
        time_op(registry.find("merge_states"), f"T{T} H32 D128 bf16", merges)
        fp8 = [s | {"out_scale": jnp.float32(0.01)} for s in merges]
        time_op(registry.find("merge_states"), f"T{T} H32 D128 bf16 to fp8", fp8)
        for label, sets in combines.items():
            time_op(registry.find("combine_partials"), label, sets)
        for mode, sets in writes.items():
            time_op(registry.find("cache_write"), f"T{T} K8 D128 {mode}", sets)
        for mode, sets in small.items():
            time_op(registry.find("cache_write"), f"T64 K8 D128 {mode}", sets)
        (out / "ops_bench.json").write_text(json.dumps(RESULTS, indent=1))
    if not options.no_peer:
        try:
            import vllm_env

            vllm_env.install()
            import torch  # noqa: F401
            from vllm import _custom_ops  # noqa: F401
        except Exception as e:
            note("errors", where="import vllm", error=f"{type(e).__name__}: {e}"[:500])
        else:
            peer_merge(merges)
            for sets in list(combines.values()):
                peer_combine(sets)
            peer_cache(writes["copy"], "auto")
            peer_cache(writes["fp8"], "fp8")
            peer_cache(small["copy"], "auto")
            peer_cache_per_head(writes["int8_token_head"], "int8")
            peer_cache_per_head(writes["fp8_token_head"], "fp8")
            peer_int4()
    (out / "ops_bench.json").write_text(json.dumps(RESULTS, indent=1))
    print(f"{len(RESULTS['checks'])} checks, {len(RESULTS['times'])} times, {len(RESULTS['errors'])} errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
