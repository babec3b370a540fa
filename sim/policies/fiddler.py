"""Fiddler: popular experts stay on the GPU, and what is missing runs on the host where that is faster than copying it.

K. Kamahori et al., ICLR 2025, arXiv 2402.07033. Experts are placed once, the most popular of a profile first, as many
as fit. When a layer needs one that is not there, its time on the CPU, which grows with its tokens, is compared with the
time to copy it, which does not; a copied expert is used and dropped. What it takes on the host is in
``sim.policies.hosting``; with ``host_gbps`` and ``shared_gbps`` of 1000000 that is the published code's ratio alone.

Decided here:

* Host and GPU work side by side and a layer ends with the later of the two: the code's comment means to minimise that
  maximum, while what it runs is the GPU's part and then the CPU's (``beside=false``).
* The most popular experts are copied when the run begins, over the link and in time, like every other policy's.
* One slot takes what is copied and dropped; a prompt's experts pass through it one by one.
* Popularity is counted over decode tokens of the profile split.
"""

import numpy as np

from sim.plan import Plan
from sim.policies.hosting import HostingPolicy, HostParameters, placed
from sim.predictors.popularity import counts_by_domain
from sim.view import View


class FiddlerParameters(HostParameters):
    """Parameters of fiddler."""


class Fiddler(HostingPolicy):
    """Static placement by popularity; absent experts run on the host when that is cheaper."""

    name = "fiddler"
    summary = "Fiddler: popular experts stay on the GPU, absent ones run on the CPU where that beats copying them"
    takes = FiddlerParameters
    variants = ("beside=False",)
    learns = True

    def plan(self, view: View) -> Plan:
        """Place the most popular experts for good; leave the rest to the host or to one slot."""
        order = self._popular(view.n_layers * view.n_experts)
        requests = placed(order, view.n_layers, view.n_experts, view.n_steps)
        return Plan(eviction="fifo", keep=False, requests=requests, host=self._host(np.sort(order)))

    def _popular(self, total: int) -> np.ndarray:
        """The most popular experts, the most used first, that leave room for one more of any size."""
        counts = np.sum([np.zeros(total, np.int64), *counts_by_domain(self.setting.profile).values()], axis=0)
        return self._fitting(np.lexsort((np.arange(total), -counts)))
