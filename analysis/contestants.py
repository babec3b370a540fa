"""The policies that several experiments compare DoMoE with, and DoMoE's own ways."""

from typing import Any

from sim.policies.named import NamedPolicy

ENTRIES = 2000
"""N: the entries of a domain's table; the paper finds 2,000 best."""
DOMOE = "domoe"
CHOICES: dict[str, dict[str, Any]] = {
    DOMOE: {"eviction": "score"},
    "domoe, one key an entry": {"eviction": "score", "keys": "entry"},
    "domoe, lru": {"eviction": "lru"},
    "domoe, perfect-lfu": {"eviction": "perfect-lfu"},
}
"""What the paper leaves open: DoMoE's parameters; FMoE beside it evicts by the same rule.

The claims are held against the first: both evict what the entries of their tables take least.
"""
MOE_INFINITY = NamedPolicy("moe-infinity", "moe-infinity")
TABLELESS = [
    NamedPolicy("lru, a layer", "lru", {"scope": "layer"}),
    NamedPolicy("perfect-lfu", "perfect-lfu"),
    NamedPolicy("popularity, domain", "popularity", {"by": "domain"}),
    NamedPolicy("clairvoyant", "clairvoyant"),
]
"""Policies that predict nothing for a token, or know the future."""
