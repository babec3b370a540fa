"""How long the GPU takes for each part of a layer call, from the model's sizes and the machine's figures.

One formula for every block (attention with router, an FFN, the LM head): its roofline (Williams et al., CACM 52, 2009),
the longer of bytes / memory bandwidth and FLOPs / arithmetic, plus a fixed software overhead, and never less than the
launches of that kind of block take. All results are int64 nanoseconds, rounded up once.

Where the machine's profile has times of FFNs or layers of just these dimensions in bf16, those are taken instead:
linear between two measured points, flat before the first and on at the last slope.

What it leaves out: activations' own traffic (small beside the weights until thousands of rows), norms, sampling, any
overlap of blocks with each other, and what linear attention computes more where it takes a prompt in chunks (a few per
cent of its layer's FLOPs).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from ground.errors import InputError
from sim.machine.figures import Curve
from sim.machine.hardware import Hardware, Layer
from traces.models.spec import ModelSpec

MOST_NS = 10**18


class Costs:
    """Compute times of ``model`` on ``hardware``.

    Notation: S layer calls (one for each decode step or prefill), L routed layers. ``tokens`` is the number of rows
    that a call carries (the batch in decode, the prompt length in prefill), ``context`` the number of cached tokens of
    all its sequences together, the new ones included. A call whose context equals its tokens is a prefill: its rows
    have nothing but each other to attend to. A call that goes on with a prompt, part of which is cached (``part``, (S,)
    bool, of no call by default), is charged the pairs of its own rows with all before them.
    """

    def __init__(self, model: ModelSpec, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        software = hardware.software
        self._memory_ns = 1e9 / hardware.memory_bytes_per_s
        self._flop_ns = 1e9 / hardware.flops_per_s
        self._operation_ns = software.operation_us.value * 1e3
        self._expert_floor_ns = software.expert_floor_us.value * 1e3
        self._layer_floor_ns = software.layer_floor_us.value * 1e3
        self._ffns = {
            ffn.hidden * ffn.width * ffn.matrices: ffn
            for ffn in hardware.ffn
            if ffn.hidden == model.hidden and ffn.matrices == model.expert_matrices
        }
        self._waited = {size: ffn.waited for size, ffn in self._ffns.items() if ffn.waited is not None}
        self._layer = _measured_layer(model, hardware)
        self._wait_ns = self._loop_us("route_wait_us") * 1e3 if software.waits_for_route else 0.0
        self.launch_ns = self._loop_ns("launch_us")
        """From the moment a route is known until resident experts begin."""
        self.awaited_extra_ns = self._loop_ns("awaited_extra_us")
        """What an expert that is waited for takes more than a resident one, if there is no curve."""
        self.beside_copy_ns = self._loop_ns("beside_copy_us")
        """What a routed layer takes more if a copy is under way as it begins."""
        self.handover_ns = self._loop_ns("handover_us")
        """What an expert's copy takes more than a copy by itself."""
        self.host_thread = None if software.host_thread is None else software.host_thread.times()
        """What the host's thread takes for each of its acts."""

    def _loop_us(self, name: str) -> float:
        """A figure of the decode loop: of this model's own layers if they were measured, else of any; 0 without."""
        found = getattr(self._layer, name, None) or getattr(self.hardware.software, name)
        return 0.0 if found is None else float(found.value)

    def _loop_ns(self, name: str) -> int:
        """The same in whole nanoseconds."""
        return int(_whole(np.array(self._loop_us(name) * 1e3)))

    def layer_ns(self, tokens: ArrayLike, context: ArrayLike, part: ArrayLike = False) -> np.ndarray:
        """Time of each call before the route of each routed layer is known, (S,) and (S,) to (S, L).

        Attention and router of the routed layer, all dense layers since the routed layer before it, for the first one
        the embedding, and the host's wait for the router's answer where the profile says that it waits.
        """
        rows, cached = _rows(tokens), _rows(context)
        prompt = (cached == rows) | np.asarray(part)
        total = np.zeros((len(rows), self.model.routed_layers))
        first = 0
        for column, layer in enumerate(self.model.moe_layers):
            for dense in range(first, layer):
                total[:, column] += self._dense_layer(rows, cached, prompt, dense)
            total[:, column] += self._attention(rows, cached, prompt, layer, self.model.router_parameters)
            total[:, column] += self._wait_ns
            first = layer + 1
        # A look-up of one row a token: bytes only, its launch is in the first layer's floor.
        total[:, 0] += rows * (self.model.embedding_table_bytes / self.model.vocab) * self._memory_ns
        return _whole(total)

    def shared_ns(self, tokens: ArrayLike) -> np.ndarray:
        """Time of the shared experts of each routed layer, (S,) to (S, L): 0 for a model without."""
        rows, sizes = _rows(tokens), np.array([self.model.ffn_bytes(layer) for layer in self.model.moe_layers])
        if not self.model.shared_ffn:
            return np.zeros((len(rows), len(sizes)), np.int64)
        return _whole(self._ffn(rows[:, None], self.model.shared_parameters, sizes[None]))

    def expert_ns(self, tokens: ArrayLike, layer: ArrayLike | None = None) -> np.ndarray:
        """Time of one routed expert over ``tokens`` rows, elementwise; 0 for 0 rows.

        ``layer`` is the index of the routed layer, 0 to L - 1, which matters where layers differ in expert size.
        """
        rows, index = np.asarray(tokens), np.asarray(0 if layer is None else layer)
        size = np.asarray(self.model.expert_bytes, dtype=np.float64)[index]
        return _whole(np.where(rows > 0, self._ffn(rows, self.model.expert_parameters, size), 0.0))

    def awaited_ns(self, tokens: np.ndarray, layer: np.ndarray) -> np.ndarray | None:
        """The same of an expert that is waited for, which is launched meanwhile; None if it takes as long.

        One row takes `awaited_extra_ns` more, since experts of one row each run together where they are there. More
        rows take what the profile says of FFNs that are launched beforehand, or else `awaited_extra_ns` more too.
        """
        curve = self._waited.get(self.model.expert_parameters)
        if curve is None and not self.awaited_extra_ns:
            return None
        longer = self.expert_ns(tokens, layer) + self.awaited_extra_ns * (tokens > 0)
        if curve is None:
            return longer
        size = np.asarray(self.model.expert_bytes, dtype=np.float64)[layer]
        fits = (tokens > 1) & (size == 2 * self.model.expert_parameters)
        return np.where(fits, _whole(along(curve, tokens)), longer)

    def split_wave_ns(self) -> np.ndarray | None:
        """What so many experts of one row each, there in one wave, take more than their share of a token's (E + 1,).

        Experts that run together take a time of their own and one that they share. By itself an expert takes
        `awaited_extra_ns` longer than its share of a token's K. So the shared time is awaited_extra_ns * K / (K - 1),
        and r of them lack (K - r) / K of it. None if an expert takes no longer alone.
        """
        top_k, count = self.model.top_k, np.arange(self.model.experts + 1)
        if not self.awaited_extra_ns or top_k == 1:
            return None
        return np.where((count > 0) & (count < top_k), self.awaited_extra_ns * (top_k - count) // (top_k - 1), 0)

    def head_ns(
        self, tokens: ArrayLike, context: ArrayLike | None = None, part: ArrayLike = False, ends: ArrayLike = True
    ) -> np.ndarray:
        """Time of each call after its last routed layer, (S,) to (S,): dense layers that follow it, then the LM head.

        With ``context`` a prefill is known as such and its head runs on the last row alone; without, the head runs on
        every row and trailing dense layers read no cache. There is none where a prompt goes on: ``ends`` (S,) False.
        """
        rows = _rows(tokens)
        cached = np.zeros(len(rows)) if context is None else _rows(context)
        prompt = (cached == rows) | np.asarray(part)
        total = np.zeros(len(rows))
        for layer in range(self.model.moe_layers[-1] + 1, self.model.layers):
            total += self._dense_layer(rows, cached, prompt, layer)
        logits = np.where(prompt, 1.0, rows)
        weights = self.model.vocab * self.model.hidden
        total += np.where(ends, self._block(self.model.head_bytes, 2.0 * logits * weights, 0.0), 0.0)
        return _whole(total)

    def move_ns(self, tokens: ArrayLike, sequences: ArrayLike) -> np.ndarray:
        """Time of copying, within GPU memory, what so many sequences have cached of so many tokens; 0 for none.

        Keys, values and states are read once and written once, by one kernel launch. Keys and values of what an encoder
        read are not among them: a decoder's trace does not say how much that was.
        """
        size = np.multiply(tokens, self.model.kv_bytes_per_token) + np.multiply(
            sequences, self.model.state_bytes_per_sequence
        )
        return _whole(np.where(size > 0, self._operation_ns + 2 * size * self._memory_ns, 0.0))

    def _block(self, size: ArrayLike, flops: ArrayLike, floor_ns: float) -> np.ndarray:
        """The formula of the module's first paragraph."""
        roofline = np.maximum(np.multiply(size, self._memory_ns), np.multiply(flops, self._flop_ns))
        return np.maximum(floor_ns, self._operation_ns + roofline)

    def _ffn(self, rows: ArrayLike, parameters: int, size: ArrayLike) -> np.ndarray:
        formula = self._block(size, np.multiply(rows, 2.0 * parameters), self._expert_floor_ns)
        measured = self._ffns.get(parameters)
        if measured is None:
            return formula
        return np.where(np.equal(size, 2 * parameters), along(measured, rows), formula)

    def _dense_layer(self, rows: np.ndarray, cached: np.ndarray, prompt: np.ndarray, layer: int) -> np.ndarray:
        ffn = self._ffn(rows, self.model.dense_parameters, self.model.ffn_bytes(layer))
        return self._attention(rows, cached, prompt, layer, 0) + ffn

    def _attention(
        self, rows: np.ndarray, cached: np.ndarray, prompt: np.ndarray, layer: int, router: int
    ) -> np.ndarray:
        """Attention of one layer, or what stands in its place, and its router if it has one.

        Bytes: the weights, the cached keys and values that are read, the new ones that are written, and a state, read
        and written for each sequence. FLOPs: two for each weight and row, two for each multiply-add of a row with its
        state and of a (query, key) pair, of which a prompt of n has n (n + 1) / 2, and the part of it that begins with
        m cached as many fewer as one of m has. A window bounds what a row reads;
        with several sequences in a call it is applied to their sum. An index bounds it likewise, but scores all pairs
        and reads all of its keys. A prompt that either bounds takes the cheaper of two ways: all pairs with keys and
        values expanded, or the pairs that count with these as cached (DeepSeek-V3.2, arXiv 2512.02556, has both).
        """
        attention, window = self.model.attention_of(layer), self.model.windows[layer] or math.inf
        weights = self.model.attention_parameters(layer)
        if self._layer is not None and router:
            return self._measured_attention(self._layer, rows, cached, prompt)
        before = cached - rows
        read = np.minimum(cached, np.where(prompt, rows - 1 + window, rows * window))
        every = np.where(prompt, _pairs(cached) - _pairs(before), cached)
        pairs = np.where(prompt, _pairs(cached, window) - _pairs(before, window), read)
        work = np.where(prompt, every * attention.prefill_width, read * attention.decode_width)
        if window < math.inf:
            work = np.minimum(work, pairs * attention.decode_width)
        work += every * attention.index_width
        size = self.model.attention_bytes(layer) + (self.model.router_bytes(layer) if router else 0)
        moved = size + (read + rows) * self.model.kv_bytes(attention.kv_width)
        moved += (cached + rows) * self.model.kv_bytes(attention.index_kv_width)
        moved += np.where(prompt, 1, rows) * 2 * attention.state_bytes
        flops = 2.0 * rows * (weights + router + attention.state_width) + 2.0 * work
        return self._block(moved, flops, self._layer_floor_ns)

    def _measured_attention(self, layer: Layer, rows: np.ndarray, cached: np.ndarray, prompt: np.ndarray) -> np.ndarray:
        """Of one routed layer: a prompt by its rows; decode rows by the tokens cached for them all, weights read once.

        What more rows add to decode is what they add to a prompt, beyond its first measured point. A prompt's part
        takes what the prompt up to its end takes more than that up to its beginning, and no less than its rows alone.
        """
        alone = along(layer.prefill, rows)
        more = alone - layer.prefill.points[0][1]
        added = along(layer.prefill, cached) - along(layer.prefill, cached - rows)
        return np.where(
            prompt, np.maximum(alone, np.where(cached > rows, added, 0.0)), along(layer.decode, cached) + more
        )


def along(curve: Curve, at: ArrayLike) -> np.ndarray:
    """Nanoseconds of ``curve`` at each of ``at``: linear, flat before the first point, on at the last slope."""
    x, y = np.array(curve.points, np.float64).T
    where = np.asarray(at, np.float64)
    beyond = np.maximum(where - x[-1], 0.0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.interp(where, x, y) + beyond


def _measured_layer(model: ModelSpec, hardware: Hardware) -> Layer | None:
    """The profile's times of the routed layers of ``model``, if it has them and they are the same in all layers.

    Not for weights of another type than bf16, layers with a window or with cross-attention, nor for models whose layers
    are not all alike: those take the formula.
    """
    plain = not (model.cross_attention or any(model.windows) or model.other_layers)
    if not model.in_bf16 or not plain:
        return None
    want = (model.hidden, model.attention.shape, model.experts)
    return next((one for one in hardware.layer if (one.hidden, one.attention, one.experts) == want), None)


def _pairs(rows: np.ndarray, window: float = math.inf) -> np.ndarray:
    """Pairs of a row of a prompt with itself and those before it, up to a window."""
    reach = np.minimum(rows, window)
    return np.asarray(reach * (reach + 1) / 2 + (rows - reach) * reach)


def _rows(count: ArrayLike) -> np.ndarray:
    return np.atleast_1d(np.asarray(count, dtype=np.float64))


def _whole(nanoseconds: np.ndarray) -> np.ndarray:
    """Rounded up; what float arithmetic adds to a whole number (parts in 10^12) is not another nanosecond.

    Raises InputError for a time that 64 bits do not hold.
    """
    if (longest := nanoseconds.max(initial=0)) > MOST_NS:
        raise InputError(f"one layer takes {longest:.1e} ns; expected a model and a machine that need at most 1e18")
    return np.ceil(np.round(nanoseconds, 3)).astype(np.int64)
