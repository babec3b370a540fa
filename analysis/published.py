"""What papers report, as data with its sources (papers/NAME.toml): never mixed with what a replay gives."""

import tomllib
from functools import cache
from importlib import resources
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Metric = Literal["throughput", "hit ratio"]
COMPARED: tuple[Metric, ...] = ("throughput", "hit ratio")
"""What papers compare systems by."""
EACH, ALL = "each", "all"
"""A claim's model: of every model alone, or of the average over all."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    figure: str = Field(min_length=1)
    """Table or figure of the paper."""
    where: str = Field(min_length=1)
    """Which sentence says so."""


class Claim(_Record):
    """A published ratio, of the paper's system over a rival (``over``) or of one of its configurations over another.

    ``step`` names the two configurations. The rest says where, as far as the paper does: the data set, the slots a
    layer and the sequences that decode together.
    """

    metric: Metric
    model: str
    data: str | None = None
    slots: int | None = Field(default=None, gt=0)
    batch: int | None = Field(default=None, gt=0)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)
    over: str | None = None
    step: str | None = None

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if (self.low is None and self.high is None) or self.least > self.most:
            raise ValueError("low, high or both, low of at most high")
        if (self.over is None) == (self.step is None):
            raise ValueError("either over or step")
        return self

    @property
    def text(self) -> str:
        """The range for a table: ``1.35–1.45``, ``1.32``, ``up to 2.25``."""
        if self.low is None or self.high is None:
            return f"up to {self.high}" if self.low is None else f"from {self.low}"
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"

    @property
    def least(self) -> float:
        """The lower end of the range. An "up to" is held to the one number that it names, and so is a "from"."""
        return self.low or self.high or 0.0

    @property
    def most(self) -> float:
        """The upper end of the range, likewise."""
        return self.high or self.low or 0.0

    def meets(self, low: float, high: float) -> bool:
        """Whether the range and the interval [low, high] have a value in common."""
        return low <= self.most and self.least <= high


class Point(_Record):
    """A published absolute number ``at`` a configuration, a table size, or the slots and the batch that it names."""

    model: str
    at: str
    tokens_per_s: float | None = Field(default=None, gt=0)
    hit_ratio: float | None = Field(default=None, ge=0, le=1)
    gb: float | None = Field(default=None, gt=0)
    """GPU memory in use."""
    slots: int | None = Field(default=None, gt=0)
    batch: int | None = Field(default=None, gt=0)
    worked_out: bool = False
    """True where the paper gives a factor and not the number itself."""


class Statement(_Record):
    """What a figure is said to show where it is not a ratio or a throughput."""

    says: str
    value: float | None = None


class Published(BaseModel):
    """Everything that one paper reports."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    paper: str
    setting: str
    claim: list[Claim]
    point: list[Point]
    statement: list[Statement]

    def claims(
        self, figure: str, metric: Metric, model: str, *, over: str | None = None, step: str | None = None
    ) -> list[Claim]:
        """The claims of a figure that speak of this model alone: its own, and those made of each."""
        return [
            claim
            for claim in self.claim
            if (claim.figure, claim.metric, claim.over, claim.step) == (figure, metric, over, step)
            and (claim.model == model or (claim.model == EACH and model != ALL))
        ]

    def points(self, figure: str, model: str | None = None) -> list[Point]:
        """The absolute numbers of a figure, of one model or of all."""
        return [p for p in self.point if p.figure == figure and model in (None, p.model)]

    def said(self, figure: str) -> Statement:
        """What a figure is said to show."""
        return next(statement for statement in self.statement if statement.figure == figure)


@cache
def published(paper: str) -> Published:
    """The numbers of a paper, by its name."""
    text = (resources.files("analysis") / "papers" / f"{paper}.toml").read_text("utf-8")
    return Published.model_validate(tomllib.loads(text))


def domoe() -> Published:
    """The DoMoE paper's numbers."""
    return published("domoe")


def expertflow() -> Published:
    """The ExpertFlow paper's numbers."""
    return published("expertflow")
