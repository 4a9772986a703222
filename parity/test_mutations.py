"""Planted faults must be caught, the twin without a fault must not be."""

import numpy as np
import pytest

from jaxattn.registry import MECHANISMS
from parity import cases, execution, mutations, triangle

TWINS = [m for m in MECHANISMS if m.captures]
HIDDEN = {
    ("lse-1e-4", "reference"): "the approximate exp and tanh of torch and FA3 move the log-sum-exp by as much",
    ("scale-1-percent", "reference"): "eager 16-bit model code rounds scores by as much",
    ("p-rounded-to-bf16", "reference"): "TF32 products lose as much",
    ("scores-rounded-to-bf16", "reference"): "TF32 products lose as much",
}
"""Faults that a capture with explained roundings may hide; other captures must show them."""


@pytest.fixture(scope="module")
def mutants(loaded):
    return mutations.run(TWINS, loaded)


@pytest.fixture(scope="module")
def contract_mutants():
    return [mutant for mechanism in TWINS for mutant in mutations.contract(mechanism)]


def test_the_kill_rate_is_100_percent(mutants, capsys):
    with capsys.disabled():
        print(f"\nplanted faults caught: {mutations.rate(mutants):.0%} of {len(mutants)}")
    survivors = [f"{m.fault} in the {m.planted}: {m.what}" for m in mutants if not m.caught]
    assert not survivors, "no comparison noticed:\n" + "\n".join(survivors)
    assert mutations.rate(mutants) == 1


def test_every_fault_is_caught_wherever_it_changes_anything(mutants):
    missed = [
        f"{m.fault} in the {m.planted}: caught in {m.caught} of {m.applicable} cases"
        for m in mutants
        if m.caught < m.applicable and (m.fault, m.planted) not in HIDDEN
    ]
    assert not missed, "\n".join(missed)


def test_every_fault_changes_some_capture_or_case(mutants, contract_mutants):
    planted = {(m.mechanism, m.fault) for m in (*mutants, *contract_mutants)}
    unused = [(m.name, f.name) for m in TWINS for f in mutations.find(m.name).faults if (m.name, f.name) not in planted]
    assert not unused, f"no capture and no case is affected by {unused}"


def test_a_fault_in_the_kernel_is_seen_by_both_of_its_edges(mutants):
    for m in mutants:
        if m.planted == "kernel":
            assert m.by["reference_vs_kernel"] == m.applicable, m


def test_the_contract_catches_every_fault_wherever_it_changes_anything(contract_mutants):
    missed = [f"{m.fault}: {m.caught} of {m.applicable}" for m in contract_mutants if m.caught < m.applicable]
    assert contract_mutants and not missed, "\n".join(missed)


def test_the_twin_without_a_fault_passes_every_comparison(loaded):
    failures = []
    for mechanism, capture in triangle.pair(TWINS, loaded):
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


@pytest.mark.parametrize("mechanism", TWINS, ids=lambda m: m.name)
def test_the_twin_agrees_with_the_reference_on_its_own_cases(mechanism):
    adapter, run = cases.find(mechanism.name), mutations.find(mechanism.name).twin
    for case in mechanism.cases[:3]:
        args = case.make(np.random.default_rng(0))
        truth, same = (execution.reference(mechanism, args, wide=wide) for wide in (True, False))
        twin = run(mutations.on_host(args), False)
        for name, x in twin.items():
            sides = {"reference": same[name], "kernel": x}
            verdict = triangle.edge(adapter.outputs[name], "reference_vs_kernel", truth[name], sides)
            assert verdict.passed, f"{case.name} {name}: {verdict.reason}"


def test_without_mutants_there_is_no_rate():
    with pytest.raises(ValueError, match="no mutants"):
        mutations.rate([])
