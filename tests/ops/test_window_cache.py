"""Window cache management against brute force over many small cases."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import admission_pages, longest_hit, pages_for_hit, slot_mapping, window_cache

WINDOWS, PAGES = (1, 2, 3, 4, 5, 8, 9), (1, 2, 3, 4, 7)


def visible(position, window):
    """Positions that a query sees."""
    return [p for p in range(position + 1) if position - p < window]


def test_bc13_the_window_holds_the_token_itself():
    assert [len(visible(p, 4)) for p in range(6)] == [1, 2, 3, 4, 4, 4]
    skipped, _, _ = window_cache(jnp.array([7]), jnp.array([1]), window=4, page=1)
    assert skipped.tolist() == [4]


@pytest.mark.parametrize("window", WINDOWS)
def test_skipped_and_freeable_and_needed_against_brute_force(window):
    for page, retained in itertools.product(PAGES, (0, 2)):
        computed, new = (np.ravel(x).astype(np.int32) for x in np.meshgrid(range(25), range(6)))
        skipped, freeable, needed = (
            np.asarray(x)
            for x in window_cache(jnp.asarray(computed), jnp.asarray(new), window=window, page=page, retained=retained)
        )
        for i, (c, n) in enumerate(zip(computed.tolist(), new.tolist(), strict=True)):
            first = max(min(visible(c, window)) - retained, 0)
            assert skipped[i] == first
            gone = [b for b in range(c + 1) if all(t < first for t in range(b * page, (b + 1) * page))]
            assert gone == list(range(freeable[i]))
            pages = {t // page for t in range(c + n)} - set(gone)
            assert needed[i] == len(pages)


@pytest.mark.parametrize("window", WINDOWS)
def test_what_was_freed_is_never_read_again(window):
    for page in PAGES:
        for computed in range(20):
            _, freeable, _ = window_cache(jnp.array([computed]), jnp.array([0]), window=window, page=page)
            freed = range(int(freeable[0]) * page)
            assert not any(set(freed) & set(visible(later, window)) for later in range(computed, computed + 12))


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "eagle"])
@pytest.mark.parametrize("window", WINDOWS)
def test_longest_hit_against_brute_force(window, extra):
    for page in PAGES:
        need = pages_for_hit(window, page, extra=extra)
        for cached in itertools.product([False, True], repeat=6):
            for max_tokens in range(0, 6 * page + 2, max(page // 2, 1)):
                expected = 0
                for matched in range(min(6, max_tokens // page) + 1):
                    if all(cached[max(matched - need, 0) : matched]):
                        expected = matched
                found = longest_hit(cached, window=window, page=page, max_tokens=max_tokens, extra=extra)
                assert found == max(expected - extra, 0), (page, cached, max_tokens)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_hit_holds_all_that_the_next_query_sees(window):
    for page in PAGES:
        for cached in itertools.product([False, True], repeat=6):
            found = longest_hit(cached, window=window, page=page, max_tokens=6 * page)
            seen = {p // page for p in visible(found * page, window) if p < found * page}
            assert all(cached[b] for b in seen)


def test_pages_for_a_hit():
    assert pages_for_hit(128, 64) == 2
    assert pages_for_hit(128, 64, extra=True) == 3
    assert pages_for_hit(129, 64) == 2
    assert pages_for_hit(130, 64) == 3
    assert pages_for_hit(1, 16) == 1


@pytest.mark.parametrize("window", WINDOWS)
def test_admission_is_enough_and_tight(window):
    """The most pages held at once, over all states of a request that grows by at most `in_flight` tokens a step."""
    for page, in_flight in itertools.product(PAGES, (1, 3, 8)):
        most = 40
        bound = admission_pages(window=window, page=page, in_flight=in_flight, max_tokens=most)
        computed, new = (np.ravel(x).astype(np.int32) for x in np.meshgrid(range(most), range(1, in_flight + 1)))
        fits = computed + new <= most
        _, _, needed = window_cache(jnp.asarray(computed[fits]), jnp.asarray(new[fits]), window=window, page=page)
        held = int(needed.max())
        assert held <= bound <= held + 1


@pytest.mark.parametrize("page", PAGES)
def test_slots_against_brute_force(page, rng):
    table = rng.permutation(40).astype(np.int32)[:20].reshape(4, 5)
    table[1, :2] = -1
    request, position = (np.ravel(x).astype(np.int32) for x in np.meshgrid(range(4), range(-2, 5 * page + 3)))
    slots = np.asarray(slot_mapping(jnp.asarray(table), jnp.asarray(request), jnp.asarray(position), page=page))
    for b, p, slot in zip(request.tolist(), position.tolist(), slots.tolist(), strict=True):
        known = 0 <= p < 5 * page and table[b, p // page] >= 0
        assert slot == (table[b, p // page] * page + p % page if known else -1)


def test_an_empty_table_has_no_slots():
    slots = slot_mapping(jnp.zeros((1, 0), jnp.int32), jnp.zeros(2, jnp.int32), jnp.arange(2), page=4)
    assert slots.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (
            lambda: window_cache(jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32), window=4, page=2),
            ValueError,
            r"window_cache: new must be \[B\] with B=2 \(from computed\), got shape \(3,\)",
        ),
        (
            lambda: window_cache(jnp.zeros(2), jnp.zeros(2, jnp.int32), window=4, page=2),
            TypeError,
            "window_cache: computed must have dtype int32, got float32",
        ),
        (
            lambda: window_cache(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), window=0, page=2),
            ValueError,
            "window_cache: window must be at least 1, got 0",
        ),
        (
            lambda: window_cache(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), window=1, page=2, retained=-1),
            ValueError,
            "window_cache: retained must not be negative, got -1",
        ),
        (lambda: pages_for_hit(4, 0), ValueError, "pages_for_hit: page must be at least 1, got 0"),
        (
            lambda: admission_pages(window=4, page=2, in_flight=0, max_tokens=9),
            ValueError,
            "admission_pages: in_flight must be at least 1, got 0",
        ),
        (
            lambda: slot_mapping(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1), page=2),
            TypeError,
            "slot_mapping: position must have dtype int32, got float32",
        ),
    ],
)
def test_messages(run, error, message):
    with pytest.raises(error, match=message):
        run()
