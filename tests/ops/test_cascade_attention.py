"""What cascade attention promises: flat attention's numbers, vLLM's rules, trees found in tables, clear refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import cascade_attention, paged_attention, prefix_length, prefix_tree, registry, worthwhile
from jaxattn.ops import _cascade_cases as cases
from jaxattn.ops.cascade_attention import MECHANISM, check_groups, prepare
from pallas_kernels import _cascade_tables as tables_of
from pallas_kernels import _mosaic
from pallas_kernels import cascade_attention as mosaic
from pallas_kernels.attention._tiles import SEGMENTS
from pallas_kernels.paged_attention import prefill
from parity import cases as parity_cases
from parity import execution, tolerances, triangle

SMOKE = [c for c in MECHANISM.cases if "smoke" in c.tags]
FLAT = registry.find("paged_attention")
REF = {"implementation": "reference"}


def flat(args):
    return {k: v for k, v in args.items() if k not in ("group_start", "shared")}


def tree(*levels):
    """`group_start` and `shared` from lists of (first, last, end)."""
    G = max(map(len, levels))
    starts, ends = np.zeros((len(levels), G + 1), np.int32), np.zeros((len(levels), G), np.int32)
    for level, groups in enumerate(levels):
        for g, (_, last, end) in enumerate(groups):
            starts[level, g + 1 :], ends[level, g] = last, end
    return jnp.asarray(starts), jnp.asarray(ends)


# ---------------------------------------------------------------- the numbers
@pytest.mark.parametrize("case", SMOKE, ids=lambda c: c.name)
def test_the_truth_is_flat_attention(case, rng):
    args = case.make(rng)
    ours, whole = (execution.reference(m, a, wide=True) for m, a in ((MECHANISM, args), (FLAT, flat(args))))
    for name, x in ours.items():
        np.testing.assert_allclose(x, whole[name], rtol=tolerances.FLOAT64, atol=tolerances.FLOAT64)


@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_nothing_shared_is_flat_attention_to_the_bit(implementation, rng, interpret):
    args = SMOKE[0].make(rng) | {"implementation": implementation}
    args["shared"] = 0 * args["shared"]
    for a, b in zip(cascade_attention(**args), paged_attention(**flat(args)), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_two_requests_by_hand():
    """Uniform scores: each query averages its visible values; values are the token's number, 100 apart by request."""
    page, T = 2, 5
    values = np.zeros((8, page, 1, 64), np.float32)
    table = np.array([[3, 1, 4], [3, 1, 6]], np.int32)
    for b, numbers in enumerate(([0, 1, 2, 3, 4], [0, 1, 2, 3, 104])):
        for t, x in enumerate(numbers):
            values[table[b, t // page], t % page] = x
    args = {
        "q": jnp.zeros((2, 1, 64)),
        "k_pages": jnp.zeros_like(values),
        "v_pages": jnp.asarray(values),
        "page_table": jnp.asarray(table),
        "lengths": jnp.full(2, T, jnp.int32),
        "query_start": jnp.arange(3, dtype=jnp.int32),
    }
    group_start, shared = tree([(0, 2, 4)])
    o, lse = cascade_attention(**args, group_start=group_start, shared=shared, return_lse=True, checked=True, **REF)
    np.testing.assert_allclose(o[:, 0, 0], [2, 22], rtol=4 * np.finfo(np.float32).eps, atol=0)
    np.testing.assert_allclose(lse, np.full((2, 1), np.log(5)), rtol=4 * np.finfo(np.float32).eps, atol=0)
    # a sink of weight 5 e^0, counted once: half of the mass is dropped
    o = cascade_attention(
        **args, group_start=group_start, shared=shared, sinks=jnp.full(1, np.log(5), jnp.float32), **REF
    )
    np.testing.assert_allclose(o[:, 0, 0], [1, 11], rtol=8 * np.finfo(np.float32).eps, atol=0)


def test_bc05_a_prefix_hit_gives_what_a_cold_run_gives(rng):
    """One request cold, and as a hit on its own first pages: natural logarithms on both sides of the merge."""
    args = cases.make_inputs(rng, (3,), (50,), (((0, 1, 32),),), dtype="float32", return_lse=True)
    hit, cold = (execution.call(m, a, "reference") for m, a in ((MECHANISM, args), (FLAT, flat(args))))
    for name in hit:
        size = np.abs(cold[name]).max() * np.finfo(np.float32).eps
        np.testing.assert_allclose(hit[name], cold[name], rtol=0, atol=32 * size)


@pytest.mark.parametrize("sink", [-np.inf, np.inf])
def test_bc11_sinks_at_their_limits(sink, rng):
    args = SMOKE[0].make(rng) | REF
    with_sink = cascade_attention(**args, sinks=jnp.full(8, sink, jnp.float32))
    without = cascade_attention(**args)
    if sink < 0:
        np.testing.assert_array_equal(np.asarray(with_sink[0]).view(np.uint16), np.asarray(without[0]).view(np.uint16))
    else:
        assert (np.asarray(with_sink[0], np.float32) == 0).all()
    np.testing.assert_array_equal(with_sink[1], without[1])


def test_bc19_the_first_request_tells_where_the_shared_pages_are_and_lengths_are_each_ones_own(rng):
    """Equal maxima of queries and lengths, different prefixes: nobody sees a neighbour's suffix."""
    args = cases.make_inputs(rng, (8, 2), (40, 38), (((0, 2, 16),),), dtype="float32", return_lse=True)
    one = cascade_attention(**args, **REF)
    alone = flat(args) | {"page_table": args["page_table"][1:], "lengths": args["lengths"][1:]}
    alone |= {"q": args["q"][8:], "query_start": jnp.array([0, 2], jnp.int32)}
    for a, b in zip(one, paged_attention(**alone, **REF), strict=True):
        np.testing.assert_allclose(a[8:], b, rtol=0, atol=32 * np.abs(b).max() * np.finfo(np.float32).eps)


def test_new_prefixes_do_not_compile_again(rng):
    args = SMOKE[0].make(rng)
    traces = []

    @jax.jit
    def step(shared, lengths):
        traces.append(1)
        return cascade_attention(**(args | {"shared": shared, "lengths": lengths}), **REF)

    for shared in (32, 16, 0):
        step(jnp.full((1, 1), shared, jnp.int32), args["lengths"])
    assert len(traces) == 1


# ---------------------------------------------------------------- tables
def test_levels_cover_every_token_once(rng):
    args = SMOKE[2].make(rng)  # a tree of two levels
    tables = [args[x] for x in ("page_table", "lengths", "query_start", "group_start", "shared")]
    prefixes, (own, own_lengths, _) = mosaic.levels(*tables, page=16)
    starts, shared = np.asarray(args["group_start"]), np.asarray(args["shared"])
    for b, length in enumerate(np.asarray(args["lengths"])):
        pages = []
        for level, (table, lengths, rows) in enumerate(prefixes):
            g = int(np.searchsorted(starts[level], b, side="right")) - 1
            if g < shared.shape[1]:
                pages += np.asarray(table)[g, : int(lengths[g]) // 16].tolist()
                assert int(rows[g]) <= int(args["query_start"][b]) < int(rows[g + 1])
        pages += np.asarray(own)[b, : -(-int(own_lengths[b]) // 16)].tolist()
        assert pages == np.asarray(args["page_table"])[b, : -(-length // 16)].tolist()


def test_many_groups_are_found_as_few_are(rng):
    """More groups than are written out one by one."""
    B = 24
    table = jnp.asarray(rng.integers(0, 99, (B, 6)), jnp.int32)
    lengths, start = jnp.full(B, 90, jnp.int32), jnp.arange(B + 1, dtype=jnp.int32)
    groups = [(i, i + 2, 16 * (1 + i % 3)) for i in range(0, B, 2)]
    prefixes, (own, own_lengths, _) = mosaic.levels(table, lengths, start, *tree(groups), page=16)
    for b in range(B):
        end = groups[b // 2][2] // 16
        assert int(prefixes[0][1][b // 2]) == 16 * end and int(own_lengths[b]) == 90 - 16 * end
        np.testing.assert_array_equal(own[b, : 6 - end], table[b, end:])


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_found_in_the_tables_is_valid_and_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    B, page = 7, 4
    table = np.sort(rng.integers(0, 3, (B, 5)), 0).astype(np.int32)
    lengths = rng.integers(12, 21, B)
    start = np.arange(B + 1)
    starts, ends = prefix_tree(table, lengths - 1, page, levels=3)
    check_groups(table, lengths, start, starts, ends, page=page)
    assert starts.shape == (3, B + 1) and ends.shape == (3, B)
    # neighbours that have their first page in common are in one group of the first level
    group = np.searchsorted(starts[0], np.arange(B), side="right") - 1
    for b in range(B - 1):
        assert (group[b] == group[b + 1]) == (table[b, 0] == table[b + 1, 0])


def test_a_tree_by_hand():
    table = np.array([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 4, 4], [5, 6, 7, 7]])
    starts, ends = prefix_tree(table, np.array([64, 60, 64, 64]), 16, levels=2)
    np.testing.assert_array_equal(starts, [[0, 3, 4, 4, 4], [0, 2, 3, 4, 4]])
    np.testing.assert_array_equal(ends, [[32, 0, 0, 0], [48, 32, 0, 0]])
    starts, ends = prefix_tree(table, np.array([64, 60, 64, 64]), 16, levels=1, min_pages=3)
    np.testing.assert_array_equal(starts, [[0, 2, 3, 4, 4]])
    np.testing.assert_array_equal(ends, [[48, 0, 0, 0]])


# ---------------------------------------------------------------- vLLM's rules
@pytest.mark.parametrize(
    ("pages", "page", "computed", "expected"),
    [
        (4, 16, [100, 70, 64], 64),
        (4, 16, [100, 63, 64], 48),  # a query lies inside the fourth page
        (4, 16, [100, 3], 0),
        (0, 16, [100], 0),
        (3, 64, [1000, 1000], 192),
    ],
)
def test_prefix_length(pages, page, computed, expected):
    assert prefix_length(pages, page, np.array(computed)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),  # 64 requests, 32/8 heads: 1 wave x 32 tiles < 128 waves
        ({"prefix": 255}, False),
        ({"prefix": 256}, True),
        ({"requests": 7}, False),
        ({"alibi": True}, False),
        ({"window": True}, False),
        ({"local": True}, False),
        ({"ranks": 2}, False),
        ({"requests": 8, "kv_heads": 1}, False),  # one wave of 32 tiles is not less than 2
        ({"requests": 8, "kv_heads": 1, "queries": 2}, True),  # flat attention does not split its keys
        ({"requests": 8, "kv_heads": 32}, True),  # nor without groups
        ({"requests": 8, "prefix": 4096, "num_sms": 2}, True),
    ],
)
def test_worthwhile(change, expected):
    options = {"prefix": 4096, "requests": 64, "queries": 1, "heads": 32, "kv_heads": 8, "num_sms": 132} | change
    queries = np.full(options.pop("requests"), options.pop("queries"))
    assert (
        worthwhile(options.pop("prefix"), queries, options.pop("heads"), options.pop("kv_heads"), **options) is expected
    )


def test_worthwhile_against_the_formula(rng):
    for _ in range(200):
        prefix, B, K, sms = (int(rng.integers(*x)) for x in ((256, 9000), (8, 300), (1, 9), (1, 140)))
        group = int(rng.integers(2, 9))
        tiles = -(-prefix // 128)
        cascade = -(-(K * group * -(-B // 128)) // sms) * tiles
        flat = -(-(B * K * 1 * tiles) // sms)
        assert worthwhile(prefix, np.ones(B, int), K * group, K, num_sms=sms) == (cascade < flat)


# ---------------------------------------------------------------- refusals
def good(**changes):
    return SMOKE[2].make(np.random.default_rng(0)) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group_start": [[1, 4, 5], [0, 2, 4]]},
            r"group_start\[0\] must rise from 0 to at most 5 requests, got \[1, 4, 5\]",
        ),
        ({"group_start": [[0, 4, 6], [0, 2, 4]]}, r"group_start\[0\] must rise from 0 to at most 5 requests"),
        (
            {"shared": [[17, 0], [48, 32]]},
            r"shared\[0, 0\] must be a multiple of the page, 16, and not less than 0, .*; got 17",
        ),
        ({"shared": [[16, 0], [48, 0]]}, r"shared\[1, 1\] must be a multiple .* not less than 16"),
        (
            {"shared": [[16, 0], [64, 32]]},
            r"shared\[1, 0\] is 64, but request 0 has only 49 tokens before its first query",
        ),
        ({"shared": [[32, 0], [48, 32]]}, r"shared\[0, 0\] is 32, but requests 0 and 2 differ in those pages"),
    ],
)
def test_checked_reads_the_groups(changes, message):
    changes = {k: jnp.asarray(v, jnp.int32) for k, v in changes.items()}
    with pytest.raises(ValueError, match=f"cascade_attention: {message}"):
        prepare(**good(**changes), checked=True)


def test_messages(rng):
    with pytest.raises(TypeError, match="cascade_attention: shared must have dtype int32, got float32"):
        prepare(**good(shared=jnp.zeros((2, 2))))
    with pytest.raises(ValueError, match=r"cascade_attention: shared must be \[L G\] with G=2 \(from group_start\)"):
        prepare(**good(shared=jnp.zeros((2, 3), jnp.int32)))
    with pytest.raises(ValueError, match="check_groups before jit"):
        jax.jit(lambda shared: check_groups(*(good()[x] for x in TABLES), shared, page=16))(good()["shared"])
    with pytest.raises(ValueError, match="needs common_pages >= 0 and page >= 1, got -1 and 16"):
        prefix_length(-1, 16, np.array([3]))
    with pytest.raises(ValueError, match="splits must be 1, 2, 4, 8 or 16, got 3"):
        mosaic.Config(splits=3, prefix=None, suffix=None, merge=None)


TABLES = ("page_table", "lengths", "query_start", "group_start")


# ---------------------------------------------------------------- the kernel's choices
def prepared(label):
    return prepare(**dict(MECHANISM.support)[label])


def test_a_long_prefix_is_cut_to_fill_the_card():
    one = prepared("bfloat16, D 128, one prefix")
    assert mosaic.default_config(**one).splits == 4
    two = prepared("bfloat16, D 128, two levels of 8 groups")
    assert mosaic.default_config(**two).splits == 2
    assert {c.splits for c in mosaic.configs(**two)} == {1, 2, 4}
    assert mosaic.default_config(**one) in list(mosaic.configs(**one))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_every_number_of_segments_gives_the_same(splits, rng, interpret):
    args = cases.make_inputs(rng, (1, 1), (70, 67), (((0, 2, 64),),), H=4, dtype="float32", sinks=True)
    config = next(c for c in mosaic.configs(**prepare(**args)) if c.splits == splits)
    got = cascade_attention(**args, implementation="mosaic", config=config)
    truth = execution.reference(MECHANISM, args, wide=True)["o"]
    same = execution.reference(MECHANISM, args)["o"]
    assert np.abs(got - truth).max() <= 2 * np.abs(same - truth).max() + np.finfo(np.float32).eps * np.abs(truth).max()


@pytest.mark.parametrize("way", ["one", "four", "flat"])
def test_the_kernel_of_prompts_gives_the_same(way, rng, interpret, monkeypatch):
    """Several tiles of each thread block, counted ahead; a request that shares nothing, one group without a request."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 3)
    tree = ((0, 3, 128), (3, 3, 128))
    args = cases.make_inputs(rng, (40, 1, 20, 70), (200, 140, 150, 90), tree=(tree,), H=4, K=2, sinks=True)
    args |= {"return_lse": True}
    prepared = prepare(**args)
    found = [c for c in mosaic.configs(**prepared) if isinstance(c.prefix, prefill.Config)]
    config = next(
        c for c in found if (c.splits, c.flat is not None) == ({"one": 1, "four": 4, "flat": 1}[way], way == "flat")
    )
    got = dict(zip(("o", "lse"), cascade_attention(**args, implementation="mosaic", config=config), strict=True))
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, spec in parity_cases.find(MECHANISM.name).outputs.items():
        sides = {"reference": same[name], "kernel": np.asarray(got[name])}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


def joinable(rng, **changes):
    """Requests of four tokens, one of three and a row of padding, whose prefix fills a tile of prefill's kernel."""
    args = cases.make_inputs(
        rng, (4,) * 7 + (3,), (68, 70, 99, 72, 80, 68, 131, 67), (((0, 7, 64),),), H=2, K=1, **changes
    )
    return args, next(c for c in mosaic.configs(**prepare(**args)) if c.joined and c.splits == 2)


def judged(args, config):
    got = dict(zip(("o", "lse"), cascade_attention(**args, implementation="mosaic", config=config), strict=True))
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, spec in parity_cases.find(MECHANISM.name).outputs.items():
        sides = {"reference": same[name], "kernel": np.asarray(got[name])}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"
    return got


@pytest.mark.parametrize("way", ["whole", "swapped", "shared"])
def test_suffixes_take_in_the_results_of_prefixes(way, rng, interpret):
    """The last request shares nothing; in shares some tiles are cut, and take them in once."""
    args, config = joinable(rng, padding=1, sinks=True, return_lse=True)
    changes = {"whole": {"num_stages": 1}, "swapped": {"swapped": True}, "shared": {"num_shares": 5}}[way]
    judged(args, dataclasses.replace(config, suffix=dataclasses.replace(config.suffix, **changes)))


def test_joined_results_do_not_depend_on_the_batch(rng, interpret):
    """The same requests in another order: bits, but for the lse, whose last product and sum XLA may fuse on a CPU."""
    args, config = joinable(rng, padding=1, return_lse=True)
    order, rows = np.array([6, 2, 1, 0, 5, 4, 3, 7]), np.arange(32).reshape(8, 4)
    other = (
        args | {name: args[name][order] for name in ("page_table", "lengths")} | {"q": args["q"][rows[order].ravel()]}
    )
    one, two = (cascade_attention(**x, implementation="mosaic", config=config) for x in (args, other))
    (o, lse), (o_other, lse_other) = ((np.asarray(x) for x in both) for both in (one, two))
    o, lse = (x[rows[order].ravel()][:31] for x in (o, lse))
    np.testing.assert_array_equal(o.view(np.uint8), o_other[:31].view(np.uint8))
    assert (np.abs(lse - lse_other[:31]) <= np.spacing(np.abs(lse))).all()


def test_joining_nothing_is_flat_attention_to_the_bit(rng, interpret):
    args, config = joinable(rng, padding=1, return_lse=True)
    args |= {"shared": 0 * args["shared"], "implementation": "mosaic"}
    alone = paged_attention(**flat(args), config=config.suffix)
    for a, b in zip(cascade_attention(**args, config=config), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("page", [2, 3])
def test_segments_are_the_stacked_tables(page, splits, rng):
    """Rows of the small table say what the stacked page tables say, and count tiles as they are counted."""
    groups = tree(
        [(0, 3, 6 * page), (3, 4, 2 * page), (4, 6, 0)], [(0, 2, 9 * page), (2, 3, 6 * page), (3, 4, 5 * page)]
    )
    table, N, block_q = jnp.asarray(rng.permutation(70).reshape(7, 10), jnp.int32), 23, 4
    start, lengths = jnp.array([0, 4, 5, 5, 11, 12, 16, 21], jnp.int32), jnp.full(7, 10 * page, jnp.int32)
    prefixes, _ = mosaic.levels(table, lengths, start, *groups, page=page)
    stacked, counts, rows = tables_of.stacked(prefixes, splits, N, page)
    spans, done = tables_of.spans(lengths, start, *groups, page=page)
    for few in (32, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables_of, "_FEW", few)
            found = tables_of.segments(start, groups[0], spans, splits=splits, N=N, page=page, block_q=block_q)
        requests = dict(zip(SEGMENTS, np.asarray(found).T, strict=True))
        np.testing.assert_array_equal(requests["lengths"][:-2], counts)
        np.testing.assert_array_equal(requests["query_start"][:-1], rows)
        tiles = -(-np.diff(np.asarray(rows)) // block_q)
        np.testing.assert_array_equal(requests["first_tile"], [0, *np.cumsum(tiles), tiles.sum()])
        for i, n in enumerate(np.asarray(counts)):
            pages = np.arange(-(-n // page))
            seen = np.asarray(table)[requests["table_row"][i], requests["first_page"][i] + pages]
            np.testing.assert_array_equal(seen, np.asarray(stacked)[i, pages])
    mine = np.asarray(tables_of.own(start, groups[0], done, B=7))
    np.testing.assert_array_equal(mine[:, 0], [9 * page, 9 * page, 6 * page, 5 * page, 0, 0, 0])
    np.testing.assert_array_equal(mine[:, 1], [0, 0, 0, 1, 2, 2, 3])
    np.testing.assert_array_equal(mine[:, 2], np.asarray(start)[[0, 0, 0, 3, 4, 4, 6]])
    np.testing.assert_array_equal(mine[:, 3], [0, 0, 1, 2, 3, 3, 3])


def test_joined_wants_the_kernels_that_know_of_each_other():
    args = prepared("bfloat16, D 128, one prefix")
    found = [c for c in mosaic.configs(**args) if c.joined]
    assert {c.splits for c in found} == {1, 2, 4, 8}
    assert {(c.suffix.swapped, c.suffix.num_shares is None) for c in found} == {
        (False, True),
        (True, True),
        (False, False),
        (True, False),
    }
    assert mosaic.default_config(**args).joined
    assert not mosaic.default_config(**prepared("bfloat16, float8_e4m3fn cache, D 128, one prefix")).joined
    assert not mosaic.default_config(**prepared("float32, D 64, one prefix")).joined
    with pytest.raises(
        ValueError, match="joined needs a prefix of prefill's kernel and a suffix of the decoding kernel's"
    ):
        mosaic.Config(splits=1, prefix=None, suffix=None, merge=None, joined=True)
    sixteen = dataclasses.replace(found[0], splits=16)
    arrays = {name: x for name, x in args.items() if hasattr(x, "shape")}
    with pytest.raises(ValueError, match="at most 8 partial results may join a tile of 8 rows, got 16"):
        jax.eval_shape(lambda x: mosaic.cascade_attention(config=sixteen, **(args | x)), arrays)


def test_many_joined_suffixes_are_not_shared_out():
    """By shapes alone: the tiles of 66 requests with 8 KV heads fill 132 multiprocessors twice over."""
    args = prepared("bfloat16, D 128, one prefix")
    for B, many in ((65, False), (66, True)):
        q, pages = (
            jax.ShapeDtypeStruct((B, 32, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((512, 64, 8, 128), jnp.bfloat16),
        )
        tables = {"page_table": (B, 128), "lengths": (B,), "query_start": (B + 1,)}
        more = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in tables.items()}
        config = mosaic.default_config(**args | {"q": q, "k_pages": pages, "v_pages": pages} | more)
        assert config.joined
        assert (config.suffix.num_shares is None, config.suffix.num_stages == 1) == (many, many)


def test_long_prompts_run_flat():
    """By shapes alone: from 128 query rows a request on."""
    args = prepared("bfloat16, D 128, one prefix")
    B = args["page_table"].shape[0]
    for rows, flat in ((127 * B, False), (128 * B, True)):
        q = jax.ShapeDtypeStruct((rows, *args["q"].shape[1:]), jnp.bfloat16)
        assert (mosaic.default_config(**args | {"q": q}).flat is not None) == flat
