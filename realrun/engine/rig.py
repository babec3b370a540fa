"""What runs of one model share: a device, experts in host memory, the layers around them and slots to use again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ground.errors import InputError
from ground.text import amount
from realrun.device.devices import Device
from realrun.device.host_store import HostStore, host_bytes
from realrun.device.open_device import open_device
from realrun.device.slots import Room
from realrun.engine.experts import expert_size
from realrun.engine.layers import Layers
from sim.run.scene import Scene
from sim.run.terms import Slots
from sim.workload import cached_tokens
from traces.models.spec import ModelSpec
from traces.schema import PREFILL


@dataclass
class Rig:
    """One model's experts and layers on one device, made once for all runs of a comparison; see ``open_rig``."""

    device: Device
    store: HostStore
    model: ModelSpec
    seed: int = 0
    layers: Layers | None = None
    _room: Room | None = None
    _slot_bytes: int = 0
    """What the room has been made for."""

    def layers_for(self, scene: Scene) -> Layers:
        """The model's resident part for a run of ``scene``; longer contexts have it made anew, for the longest yet."""
        schedule = scene.work.schedule
        context = int(cached_tokens(scene.trace, schedule).max(initial=1))
        prompt = int(np.diff(schedule.offsets)[schedule.phase == PREFILL].max(initial=1))
        if self.layers is not None:
            context, prompt = max(context, self.layers.context), max(prompt, self.layers.prompt)
            if (context, prompt) == (self.layers.context, self.layers.prompt):
                return self.layers
            self.layers = None  # its memory is needed
        self.layers = Layers(self.device, self.model, context, prompt, self.seed)
        return self.layers

    def room_for(self, slots: Slots) -> Room:
        """The room for a run's slots, which the runs share. Raises InputError where these cannot be had."""
        remedy = "give a smaller --cache, --shared N or --scale N"
        self._slot_bytes = max(self._slot_bytes, self.store.refuse_slots(slots, remedy, self._slot_bytes))
        self._room = self._room or Room(self.device)
        return self._room

    def empty(self) -> None:
        """Let go of all memory of the device."""
        self.layers, self._room, self._slot_bytes = None, None, 0


@contextmanager
def open_rig(
    model: ModelSpec, device: str = "cuda", *, shared: int | None = None, limit: int | None = None, seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Rig]:  # fmt: skip
    """Put the experts of ``model`` into pinned host memory for runs on ``device``.

    Args:
        model: experts of one size, in bf16.
        device: cuda, cuda:N or cpu.
        shared: store only so many experts, each standing for several.
        limit: bytes of host memory that may be used.
        seed: of the random weights.
        say: told in a line what takes long.

    Raises InputError for a device that is not there, too little memory of either kind, or memory that cannot be pinned.
    """
    size, experts = expert_size(model), model.routed_layers * model.experts
    if shared is not None and shared < 1:
        raise InputError(f"--shared {shared}; expected at least 1 expert in host memory")
    with open_device(device) as opened:
        stored = min(experts, shared or experts)
        say(f"host memory: {amount(host_bytes(stored, size))} for {stored} experts of {amount(size)}")
        store = HostStore(opened, experts, size, shared=shared, limit=limit, scale=model.hidden**-0.5, seed=seed)
        say(f"{store.describe()}, in {store.seconds:.1f} s")
        rig = Rig(opened, store, model, seed)
        try:
            yield rig
        finally:
            opened.synchronize()
            rig.empty()
            store.close()
