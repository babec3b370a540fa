"""What the tokens of each id took: the statistics behind TLP, the token-level guess."""

import numpy as np


class TokenCounts:
    """How often rows with tokens (R,) took each expert, by token id; their routes are ``experts`` (R, L, K)."""

    def __init__(self, token: np.ndarray, experts: np.ndarray, n_experts: int) -> None:
        self._ids, self._number = np.unique(token, return_inverse=True)
        self._experts, self._n_experts = experts, n_experts

    def places(self, token: np.ndarray) -> np.ndarray:
        """The row of `of_layer` of each token: the last one, which counts nothing, for an id that never came."""
        if not len(self._ids):
            return np.zeros(len(token), np.int64)
        place = np.searchsorted(self._ids, token).clip(max=len(self._ids) - 1)
        return np.where(self._ids[place] == token, place, len(self._ids))

    def of_layer(self, layer: int) -> np.ndarray:
        """Counts (ids + 1, E) of one layer."""
        counts = np.zeros((len(self._ids) + 1, self._n_experts + 1), np.int64)  # one expert more, for none
        for slot in range(self._experts.shape[2]):
            np.add.at(counts, (self._number, self._experts[:, layer, slot].astype(np.int64)), 1)
        return counts[:, :-1]
