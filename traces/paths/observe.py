"""What becomes known with a layer's route: learn from it, remember it, and tell what comes next.

A visit is a layer's call of one token. After each the state tells, of every expert of that layer, the chance of use at
the next visit and at later ones, from how the expert was used (``_describe``), from the experts that the token and the
one before took a few calls earlier (the path), and from all experts that the sequence took of late (the topic). All
chances are logistic regressions, learned step by step by AdaGrad.
"""

from typing import Any

import numpy as np

from traces.paths.arithmetic import NONE, ONE, add, add_scaled, descend, fill, inner, shared, to_chances, to_logarithms
from traces.paths.state import (
    AGE,
    BASE,
    COUNT,
    DECAYED,
    DECAYS,
    FEATURES,
    GATE,
    HEADS,
    TOPIC,
    TOPIC_DECAYS,
    WINDOWS,
    Paths,
)

PROMPT_ROWS = 128
"""So many of a prompt's last rows are remembered one by one."""
SHRINKAGE = np.float32(20)
"""Visits that an expert's share in the world counts for beside those of the sequence."""
_LOGARITHMS = (2, 3, 4, 5, 7, 10)
_FRESH = DECAYS / (1 - DECAYS)
_WEIGHT = 1 - DECAYS
_OLDEST, _SLOWEST, _BYTE, _RAREST = np.float32(200), np.float32(0.0005), np.float32(1 / 255), np.float32(1e-4)
_LEAST_DECAYED, _LEAST_SHARE, _LEAST_TOPIC = np.float32(0.01), np.float32(0.003), np.float32(0.02)
_MOST_TOPIC = np.float32(3)


@shared
def observe(state: Paths, call: int) -> None:
    """The route of layer call ``call`` is known."""
    layers, experts = state.share.shape
    step, layer = call // layers, call % layers
    first, end = state.starts[step], state.starts[step + 1]
    if layer == 0:
        _begin(state, first, end)
    took = np.empty(experts, np.float32)
    for row in range(first, end):
        slot = state.slot[row]
        last = row + 1 == end or state.slot[row + 1] != slot
        if last or row >= end - PROMPT_ROWS:
            _visit(state, first, row, slot, layer, took)
            until = layers if layer == 0 and state.place[row] < state.running[slot] else layer + 1
            for told in range(layer, until):  # of a new sequence, what is known of all
                _describe(state, slot, told)
            _keep(state.kept[slot, layer], state.waiting[slot, layer], state.marks[slot, layer])
        if last:
            now = state.place[row] * layers + layer
            _tell(state.ahead[slot], now, state.path[layer], state.routes[row, layer], state.lags)
            if layer == layers - 1:
                state.last[slot] = row
    _combine(state, step, layer, layer == 0 and _changed(state.active, step))


@shared
def _begin(state: Paths, first: int, end: int) -> None:
    """A step begins: forget sequences whose place new ones take."""
    fill(state.running, 0)
    for row in range(first, end):
        slot = state.slot[row]
        state.running[slot] += 1
        if state.place[row] == 0:
            for layer in range(len(state.share)):
                _forget(state.marks[slot, layer], state.share[layer])
                fill(state.topic_parts[slot, layer].reshape(-1), NONE)
                fill(state.waiting[slot, layer], -1)
                state.seen[slot, layer] = 0
            fill(state.topic[slot], NONE)
        if state.place[row] == 0 or state.running[slot] > 1:
            fill(state.ahead[slot].reshape(-1), NONE)
        state.tokens[slot] = state.place[row]


@shared
def _changed(active: np.ndarray, step: int) -> bool:
    """Whether other sequences run than in the step before."""
    changed = step == 0
    for slot in range(active.shape[1]):
        changed = changed or active[step, slot] != active[step - 1, slot]
    return changed


@shared
def _combine(state: Paths, step: int, layer: int, everything: bool) -> None:
    """Tell of all sequences together what this call has told of each, or everything."""
    layers = len(state.share)
    index = 0
    for lag in range(1, layers + 1):
        if state.lags[index] < lag:
            index += 1
        if everything or state.lags[index] == lag:
            _combine_next(state, step, (layer + lag) % layers, layer + lag, index)
    for target in range(0 if everything else layer, layers if everything else layer + 1):
        _combine_later(state.chances[target], state.active[step], state.marks, target, np.float32(layers))


@shared
def _forget(marks: np.ndarray, share: np.ndarray) -> None:
    """Of a new sequence nothing is known but what is known of all."""
    for i in range(len(share)):
        marks[COUNT, i] = marks[GATE, i] = NONE
        marks[AGE, i] = _OLDEST
        for decay in range(len(DECAYS)):
            marks[DECAYED + decay, i] = share[i] * _FRESH[decay]


@shared
def _visit(state: Paths, first: int, row: int, slot: int, layer: int, took: np.ndarray) -> None:
    route, marks = state.routes[row, layer], state.marks[slot, layer]
    fill(took, NONE)
    for expert in route:
        if expert >= 0:
            took[expert] = ONE
    if state.options[0] > 0 and state.seen[slot, layer] > 0:
        _learn_next(state, first, row, slot, layer, took)
    for window in range(3):
        waiting, kept = state.waiting[slot, layer], state.kept[slot, layer, window]
        head = window + 1
        if waiting[window] >= 0:
            waiting[window] += 1
            if waiting[window] > WINDOWS[head]:
                add(kept[FEATURES], took)
            if waiting[window] == WINDOWS[head + 1]:
                waiting[window] = -1
                if state.options[0] > 0:
                    visits = np.float32(WINDOWS[head + 1] - WINDOWS[head])
                    _learn_later(state.heads[head], state.head_sums[head], state.rates[2], kept, visits)
    state.seen[slot, layer] += 1
    _remember(marks, state.share[layer], state.visits, layer, took, route, state.gates[row, layer])
    if state.topic.shape[1] > 0:
        _turn_topic(
            state.topic[slot], state.topic_parts[slot, layer], state.topic_in, state.topic_mean[:, layer], layer, route
        )


@shared
def _keep(kept: np.ndarray, waiting: np.ndarray, marks: np.ndarray) -> None:
    """Keep features for the later heads that have none, until their windows have passed."""
    for window in range(len(waiting)):
        if waiting[window] < 0:
            waiting[window] = 0
            for index in range(FEATURES):
                row = index if index < FEATURES - 1 else TOPIC + window + 1
                for i in range(kept.shape[2]):
                    kept[window, index, i] = marks[row, i]
            fill(kept[window, FEATURES], NONE)


@shared
def _tell(ahead: np.ndarray, now: int, path: np.ndarray, route: np.ndarray, lags: np.ndarray) -> None:
    """Add what a route says of later calls."""
    fill(ahead[now % len(ahead)], NONE)
    for index in range(len(lags)):
        later = ahead[(now + lags[index]) % len(ahead)]
        for expert in route:
            if expert >= 0:
                add(later, path[expert, index])


@shared
def _source(state: Paths, first: int, row: int, layer: int, lag: int) -> tuple[int, int]:
    """Row and layer of the call so many calls before a row's in its sequence; row -1 if not known or not there.

    Rows of one prompt pass each layer together: of the row before no later layer is known.
    """
    layers = state.share.shape[0]
    if lag <= layer:
        return row, layer - lag
    if state.place[row] == 0:
        return -1, 0
    before = row - 1 if row > first and state.slot[row - 1] == state.slot[row] else state.last[state.slot[row]]
    source = layer - lag + layers
    return (before, source) if source >= 0 and (before < first or lag >= layers) else (-1, 0)


@shared
def _learn_next(state: Paths, first: int, row: int, slot: int, layer: int, took: np.ndarray) -> None:
    """A step of AdaGrad on the prediction of this visit, as it was at a distance drawn at random."""
    state.options[2] = (state.options[2] * 1103515245 + 12345) & 0x7FFFFFFF
    distance = 1 + (state.options[2] >> 8) % state.share.shape[0]
    nearest = 0
    while state.lags[nearest] < distance:
        nearest += 1
    marks, wrong = state.marks[slot, layer], np.empty(len(took), np.float32)
    for i in range(len(took)):
        wrong[i] = marks[BASE, i] + state.reach[nearest]
    for index in range(nearest, len(state.lags)):
        source, at = _source(state, first, row, layer, state.lags[index])
        if source >= 0:
            for expert in state.routes[source, at]:
                if expert >= 0:
                    add(wrong, state.path[at, expert, index])
    to_chances(wrong)
    missed = NONE
    for i in range(len(took)):
        wrong[i] -= took[i]
        missed += wrong[i]
    _descend_head(state.heads[0], state.head_sums[0], state.rates[0], wrong, marks, marks[TOPIC])
    state.reach_sums[nearest] += missed * missed
    state.reach[nearest] -= state.rates[0] * missed / np.sqrt(state.reach_sums[nearest])
    for index in range(nearest, len(state.lags)):
        source, at = _source(state, first, row, layer, state.lags[index])
        if source >= 0:
            for expert in state.routes[source, at]:
                if expert >= 0:
                    descend(state.path[at, expert, index], state.path_sums[at, expert, index], state.rates[1], wrong)


@shared
def _learn_later(heads: np.ndarray, sums: np.ndarray, rate: Any, kept: np.ndarray, visits: Any) -> None:
    """The same of a later window, when it has passed since features were kept."""
    wrong = np.empty(kept.shape[1], np.float32)
    _logit(wrong, heads, kept, kept[FEATURES - 1])
    to_chances(wrong)
    for i in range(len(wrong)):
        wrong[i] -= kept[FEATURES, i] / visits
    _descend_head(heads, sums, rate, wrong, kept, kept[FEATURES - 1])


@shared
def _descend_head(
    heads: np.ndarray, sums: np.ndarray, rate: Any, wrong: np.ndarray, features: np.ndarray, topic: np.ndarray
) -> None:
    slope = np.empty(FEATURES, np.float32)
    for index in range(FEATURES - 1):
        slope[index] = inner(wrong, features[index])
    slope[FEATURES - 1] = inner(wrong, topic)
    descend(heads, sums, rate, slope)


@shared
def _logit(into: np.ndarray, heads: np.ndarray, features: np.ndarray, topic: np.ndarray) -> None:
    fill(into, NONE)
    for index in range(FEATURES - 1):
        add_scaled(into, heads[index], features[index])
    add_scaled(into, heads[FEATURES - 1], topic)


@shared
def _remember(
    marks: np.ndarray, share: np.ndarray, visits: np.ndarray, layer: int, took: np.ndarray, route: np.ndarray,
    gates: np.ndarray,
) -> None:  # fmt: skip
    visits[layer] += ONE
    rate = max(ONE / (visits[layer] + ONE), _SLOWEST)
    for i in range(len(took)):
        share[i] += rate * (took[i] - share[i])
        marks[COUNT, i] += took[i]
        marks[AGE, i] = ONE if took[i] > NONE else min(marks[AGE, i] + ONE, _OLDEST)
    for decay in range(len(DECAYS)):
        for i in range(len(took)):
            marks[DECAYED + decay, i] = marks[DECAYED + decay, i] * DECAYS[decay] + took[i]
    for choice in range(len(route)):
        if route[choice] >= 0:
            marks[GATE, route[choice]] = np.float32(gates[choice]) * _BYTE


@shared
def _turn_topic(
    topic: np.ndarray, parts: np.ndarray, topic_in: np.ndarray, mean: np.ndarray, layer: int, route: np.ndarray
) -> None:
    """Decayed sums of what the sequence took, as few numbers; a layer's part is as of its last visit."""
    for decay in range(len(TOPIC_DECAYS)):
        part = parts[decay]
        for index in range(len(topic)):
            new = part[index] * TOPIC_DECAYS[decay] - mean[decay, index]
            for expert in route:
                if expert >= 0:
                    new += topic_in[decay, layer, expert, index]
            topic[index] += new - part[index]
            part[index] = new


@shared
def _describe(state: Paths, slot: int, layer: int) -> None:
    """What is told of a layer's experts before its next visit, but for the path.

    The features: 1; used at the last visit; logarithms of decayed use; share of the sequence's visits, shrunk towards
    that in the world, and its logarithm; gate weight at the last visit, and when last used; logarithm of visits since;
    what the topic adds to the share.
    """
    marks, share, topic, seen = state.marks[slot, layer], state.share[layer], state.topic[slot], state.seen[slot, layer]
    visits = np.float32(seen) + SHRINKAGE
    for i in range(len(share)):
        latest = ONE if marks[AGE, i] == ONE else NONE
        known = (marks[COUNT, i] + SHRINKAGE * share[i]) / visits
        marks[0, i], marks[1, i] = ONE, latest
        marks[6, i], marks[7, i] = known, _LEAST_SHARE + known
        marks[8, i], marks[9, i], marks[10, i] = marks[GATE, i] * latest, marks[GATE, i], marks[AGE, i]
    for decay in range(len(DECAYS)):
        for i in range(len(share)):
            marks[2 + decay, i] = _LEAST_DECAYED + marks[DECAYED + decay, i] * _WEIGHT[decay]
    for row in _LOGARITHMS:
        to_logarithms(marks[row])
    for head in range(HEADS):
        added, told = marks[TOPIC + head], marks[BASE + head]
        fill(added, NONE)
        for index in range(len(topic)):
            add_scaled(added, topic[index], state.topic_out[head, layer, index])
        for i in range(len(share)):
            added[i] = min(max(added[i] / (marks[6, i] + _LEAST_TOPIC), -_MOST_TOPIC), _MOST_TOPIC)
        _logit(told, state.heads[head], marks, added)
        if head > 0:  # the chance of staying unused at a visit
            to_chances(told)
            for i in range(len(share)):
                told[i] = ONE - max(told[i], _RAREST)


@shared
def _combine_next(state: Paths, step: int, target: int, ahead: int, index: int) -> None:
    """The chance that no sequence takes an expert of layer ``target`` at its next visit.

    That is ``ahead`` calls from the beginning of this step's tokens, as far as they run in this step.
    """
    layers, experts = state.share.shape
    unused = state.chances[target, 0]
    fill(unused, ONE)
    chance = np.empty(experts, np.float32)
    for slot in range(state.active.shape[1]):
        if state.active[step, slot]:
            visit = state.tokens[slot] * layers + (ahead if state.running[slot] else layers + target)
            base, told = state.marks[slot, target, BASE], state.ahead[slot, visit % (2 * layers)]
            for i in range(experts):
                chance[i] = base[i] + told[i] + state.reach[index]
            to_chances(chance)
            for i in range(experts):
                unused[i] *= ONE - chance[i]


@shared
def _combine_later(chances: np.ndarray, active: np.ndarray, marks: np.ndarray, layer: int, calls: Any) -> None:
    """What is asked of later visits (see `Paths`), of all sequences together."""
    for i in range(chances.shape[1]):
        soon = then = long = ONE
        for slot in range(len(active)):
            if active[slot]:
                soon *= marks[slot, layer, BASE + 1, i]
                then *= marks[slot, layer, BASE + 2, i]
                long *= marks[slot, layer, BASE + 3, i]
        eighth = then * then
        eighth *= eighth
        eighth *= eighth
        chances[1, i] = soon * soon * soon
        chances[2, i] = calls * (ONE + soon + soon * soon)
        chances[3, i] = chances[1, i] * eighth
        chances[4, i] = chances[2, i] + chances[1, i] * (calls * (ONE - eighth) / (ONE - then))
        chances[5, i] = chances[4, i] + chances[3, i] * (calls / (ONE - long))
