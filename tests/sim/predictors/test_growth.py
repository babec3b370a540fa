"""Domain tables that grow: what each stage holds, which tables a prompt consults, and what growing is charged."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predictors.growth import Stages, grown
from sim.predictors.prototypes import ITERATIONS
from tests.sim.policies.test_domoe import FAST, charged, policy, view, world
from tests.support.worlds import World

DOMAINS = ["law", "code", "law", "law", "code"]


def stages(here: World, **values: Any) -> Stages:
    looking, made = view(here), policy(here.setting, tables=1, **values)
    return Stages(looking, grown(looking, made.domains(1, 6), made.predictor(1, 6)))


@given(tokens=st.integers(1, 5), batch=st.integers(1, 3), entries=st.sampled_from([2, 7, 2000]))
@settings(max_examples=25, deadline=None)
def test_each_stage_holds_what_was_served_before_it(tokens: int, batch: int, entries: int) -> None:
    here = world(DOMAINS, tokens, batch=batch)
    looking, found = view(here), stages(here, entries=entries)
    (first, *others), trace = found.stages, here.trace
    assert [table.domain for table in first.predictor.tables] == ["code", "law"]
    for stage in others:
        assert stage.step in looking.prefill_steps()
    expected = {table.domain: table for table in first.predictor.tables}
    rows, done = np.flatnonzero(looking.decoding), 0
    assert trace.embeddings is not None
    for stage in others:
        new = [i for i, step in enumerate(looking.step[rows].tolist()) if step < stage.step][done:]
        done += len(new)
        for domain in ("code", "law"):
            mine = [i for i in new if DOMAINS[looking.sequence[rows[i]]] == domain]
            number = ["code", "law"].index(domain)
            assert (number in stage.appended) == bool(mine)
            if mine:
                of_trace = here.work.schedule.rows[rows[mine]]
                keys = trace.embeddings[np.searchsorted(trace.decode_rows, of_trace)]
                expected[domain], _ = expected[domain].append(
                    trace.token[of_trace], keys, trace.experts[of_trace], entries
                )
        for table in stage.predictor.tables:
            np.testing.assert_array_equal(table.keys, expected[table.domain].keys)
            np.testing.assert_array_equal(table.paths, expected[table.domain].paths)
            assert table.seen == expected[table.domain].seen


def test_predictions_of_a_step_are_those_of_its_stage() -> None:
    here = world(DOMAINS, 3)
    looking, found = view(here), stages(here)
    rows = looking.step[looking.decoding]
    assert [stage.step for stage in found.stages] == [0, 4, 8, 12, 16], "a prompt and three tokens each"
    whole = found.scores(looking, 1, [1, 2])
    for number, stage in enumerate(found.stages):
        mine = (rows >= stage.step) & (rows < stage.step + 4)
        alone = stage.predictor.vote(
            looking.embedding(1)[mine], found.chosen[looking.sequence[looking.decoding][mine]], 1, [1, 2]
        )
        np.testing.assert_array_equal(whole[mine], alone)
        assert (found.at(rows[mine]) == number).all()


def test_growing_is_charged_where_the_prompt_is_matched() -> None:
    here = world(DOMAINS, 3)
    given_ = {"tables": 1, "layers": "all", "room": 2}
    plain, growing = (policy(here.setting, grow=grow, **given_).plan(view(here)) for grow in (False, True))
    machine, hidden = here.hardware, here.model.hidden
    entry = 2 * 3 * hidden + 2 * 3 * 2  # bf16 keys of three levels; paths of 3 layers x 2 experts
    table, second = stages(here).stages[1].predictor.tables[1], stages(here).stages[1]
    assert second.appended[1].rows == 3
    centres = len(second.predictor.matching.prototypes[1].centres)
    more = FAST.search_ns(machine, centres, hidden, 6) + FAST.load_ns(machine, 3 * entry)
    more += FAST.cluster_ns(machine, len(table), hidden, centres, ITERATIONS)
    assert len(table) == second.appended[1].clustered == 12, "9 entries became 12, more than a quarter more"
    at = 4 * 4 + 1
    among = [sum(len(p.centres) for p in stage.predictor.matching.prototypes) for stage in stages(here).stages[:2]]
    before, after = (FAST.search_ns(machine, prototypes, hidden, 2) for prototypes in among)
    assert charged(growing)[at] - charged(plain)[at] == more + after - before
    assert growing.gpu_bytes == 2 * (2 * 16 * hidden) + 2 * 2000 * entry, "at the size that tables may grow to"
