"""Which tokens run together: two batches in lockstep, regrouped by their predicted routes, and what that waits for."""
