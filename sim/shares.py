"""How many slots of one pool each layer should have, from moment to moment."""

from dataclasses import dataclass

import numpy as np

from sim.plan_checks import at_fault, check_integers


@dataclass(frozen=True)
class Shares:
    """From ``moment`` (M,), rising, layers should have ``table`` (M, L) slots each; before the first, none.

    A share is no limit. A layer may take any slot that is free. When somebody must leave, it is an expert of the layer
    that holds most slots beyond its share, whoever takes the place being counted; of two such layers the later one.
    Within a layer the eviction rule decides.
    """

    moment: np.ndarray
    table: np.ndarray

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise PlanError for wrong arrays, or a share below 0."""
        check_integers("shares.moment", self.moment, end=n_steps * (n_layers + 1), rising=True)
        check_integers("shares.table", self.table, dimensions=2, length=len(self.moment), end=2**40)
        if self.table.shape[1] != n_layers:
            raise at_fault("shares.table", self.table.shape, f"{n_layers} columns, one a layer")
