"""Planted faults must be caught, the twin without a fault must not be."""

import functools

import numpy as np
import pytest

from jaxattn import registry
from jaxattn.registry import MECHANISMS
from parity import cases, mutations, sharing, triangle

TWINS = [m for m in MECHANISMS if m.captures]
HIDDEN = {
    ("lse-1e-4", "reference"): "the approximate exp and tanh of torch and FA3 move the log-sum-exp by as much",
    ("scale-1-percent", "reference"): "eager 16-bit model code rounds scores by as much",
    ("p-rounded-to-bf16", "reference"): "TF32 products lose as much",
    ("scores-rounded-to-bf16", "reference"): "TF32 products lose as much",
}
"""Faults that a capture with explained roundings may hide; other captures must show them."""


pytestmark = pytest.mark.timeout(900)
twins = pytest.mark.parametrize("mechanism", TWINS, ids=lambda m: m.name)


@pytest.fixture(scope="module")
def mutants(loaded):
    """`mutants(mechanism)`: every fault on every capture."""
    return functools.cache(lambda mechanism: mutations.run([registry.find(mechanism)], loaded))


@pytest.fixture(scope="module")
def contract_mutants():
    """`contract_mutants(mechanism)`: every fault on the mechanism's own cases, or on the share that is run."""
    return functools.cache(lambda mechanism: mutations.contract(registry.find(mechanism), sharing.asked()))


@twins
def test_every_fault_is_caught_wherever_it_changes_anything(mechanism, mutants):
    missed = [
        f"{m.fault} in the {m.planted}: caught in {m.caught} of {m.applicable} cases"
        for m in mutants(mechanism.name)
        if m.caught < m.applicable and (not m.caught or (m.fault, m.planted) not in HIDDEN)
    ]
    assert not missed, "\n".join(missed)


@twins
def test_a_fault_in_the_kernel_is_seen_by_both_of_its_edges(mechanism, mutants):
    for m in mutants(mechanism.name):
        if m.planted == "kernel":
            assert m.by["reference_vs_kernel"] == m.applicable, m


@twins
def test_the_contract_catches_every_fault_wherever_it_changes_anything(mechanism, contract_mutants):
    found = contract_mutants(mechanism.name)
    missed = [f"{m.fault}: {m.caught} of {m.applicable}" for m in found if m.caught < m.applicable]
    assert not missed, "\n".join(missed)


@twins
def test_every_fault_changes_some_capture_or_case(mechanism, mutants, contract_mutants, loaded):
    if not triangle.pair([mechanism], loaded):
        pytest.skip("none of its captures is loaded; name their folder with --captures")
    planted = {m.fault for m in (*mutants(mechanism.name), *contract_mutants(mechanism.name))}
    unused = [fault.name for fault in mutations.find(mechanism.name).faults if fault.name not in planted]
    assert planted and not unused, f"no capture and no case is affected by {unused}"


@twins
def test_the_twin_without_a_fault_passes_every_comparison(mechanism, loaded):
    failures = []
    for _, capture in triangle.pair([mechanism], loaded):
        adapter, run = cases.find(mechanism.name), mutations.find(mechanism.name).twin
        args = mutations.on_host(adapter.arguments(capture))
        explained = adapter.explain(capture, args)
        truth, same = (adapter.convention(capture, run(args, wide)) for wide in (True, False))
        for name, x in adapter.expected(capture).items():
            sides = {"capture": x, "reference": same[name], "kernel": same[name]}
            yardstick = triangle.yardstick(explained, name)
            for comparison in triangle.COMPARISONS:
                verdict = triangle.edge(adapter.outputs[name], comparison, truth[name], sides, yardstick)
                if not verdict.passed:
                    failures.append(f"{capture.name} {name} {comparison}: {verdict.reason}")
    assert not failures, "\n".join(failures)


@twins
def test_the_twin_agrees_with_the_reference_on_its_own_cases(mechanism):
    adapter, run = cases.find(mechanism.name), mutations.find(mechanism.name).twin
    for case in mechanism.cases[: 3 if sharing.asked() == 1 else 1]:
        truth, same = mutations.own(mechanism.name, case.name)
        twin = run(mutations.on_host(case.make(np.random.default_rng(0))), False)
        for name, x in twin.items():
            sides = {"reference": same[name], "kernel": x}
            verdict = triangle.edge(adapter.outputs[name], "reference_vs_kernel", truth[name], sides)
            assert verdict.passed, f"{case.name} {name}: {verdict.reason}"
