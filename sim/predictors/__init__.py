"""What policies ask: how likely each expert of a later layer is, from what is known at a point of a step."""

from sim.predictors.base import Predictor, top

__all__ = ["Predictor", "top"]
