"""What one rank owns of a chunk, [S] each: working slice, master, gradient - wherever they rest.

================  ==============  ==================================================================
slice             dtype           held
================  ==============  ==================================================================
parameter_S       param_dtype     stages 0 to 2: a view of the whole chunk; at stage 3 a buffer of
                                  its own, on the accelerator or at rest elsewhere
master_S          float32         with 16-bit parameters and master weights; in param_dtype where
                                  the state rests elsewhere than the working slice: an update reads
                                  and writes it there
gradient_S        reduce_dtype    from the reduction until zero_grad; in host memory where the
                                  state rests elsewhere
================  ==============  ==================================================================

Slices that rest on disk may be touched inside ``at_hand`` only.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from shardwise.errors import BudgetError
from shardwise.runtime.state_slices import MASTER, WORKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.state_slices import StateSlices
    from shardwise.tiers import Tier

EVERYTHING = slice(None)
"""All elements of a slice."""


class OwnSlices:
    """The slices of one chunk on one rank."""

    def __init__(
        self, parameter_S: torch.Tensor, master_S: torch.Tensor | None, *, keeps_masters: bool
    ) -> None:
        """Own slices on the accelerator."""
        self.dtype = parameter_S.dtype
        """Dtype of the working slice."""
        self.device = parameter_S.device
        """The accelerator."""
        self.numel = parameter_S.numel()
        self.keeps_masters = keeps_masters
        """Masters are float32 copies of 16-bit parameters."""
        self.gradient_S: torch.Tensor | None = None
        self.state: StateSlices | None = None
        """Masters and optimizer state where they have a home of their own."""
        self._parameter_S: torch.Tensor | None = parameter_S
        self._master_S = master_S
        self.working: StateSlices | None = None
        """The working slice where it has a home of its own."""
        self._needs_master = keeps_masters
        self.is_updated = False
        """There are updates, or will be."""

    # ------------------------------------------------------------------ where they are

    def rest_state(
        self, home: StateSlices | None, *, is_trainable: bool, is_beside_working: bool
    ) -> None:
        """Keep masters and optimizer state off the accelerator from now on.

        Args:
            home: Where; None leaves them where they are.
            is_trainable: There will be updates.
            is_beside_working: The working slice will rest there too, and can be updated itself.
        """
        if home is None:
            return
        self.is_updated = is_trainable
        self.state, master_S = home, self._master_S
        self._master_S = None
        self._needs_master |= not is_beside_working
        if is_trainable and self._needs_master:
            self._make_master(master_S)

    def detach(self, home: StateSlices | None) -> None:
        """Keep the working slice apart from the whole chunk, off the accelerator with a home."""
        working_S = self.parameter_S
        if home is None:
            self._parameter_S = working_S.clone()
            return
        if WORKING not in home:
            home.add(WORKING, self.dtype)
        with home.at_hand():
            home[WORKING].copy_(working_S)
        self.working, self._parameter_S = home, None

    def move(self, *, working: Tier, state: Tier, is_beside_working: bool) -> None:
        """Let slices that have homes rest in other tiers from now on.

        Pieces and optimizer state that look into them are void. A reduced gradient goes along.

        Args:
            working: Of the working slice, where it has a home.
            state: Of masters and optimizer state.
            is_beside_working: The working slice will rest there too, and can be updated itself.

        Raises:
            BudgetError: There is no room; nothing was changed.
        """
        resting, homes = self.state, []
        assert resting is not None
        needs_master = self.keeps_masters or not is_beside_working
        try:
            for slices, home in ((resting, state), (self.working, working)):
                if slices is not None:
                    homes.append((slices, slices.home))
                    slices.move(home)
            if needs_master and self.is_updated and MASTER not in resting:
                self._make_master(None)
        except BaseException:
            for slices, home in homes:
                with suppress(Exception):  # the first error is on its way up
                    slices.move(home)
            raise
        self._needs_master = needs_master
        if not needs_master:  # it says no more than the working slice
            resting.remove(MASTER)
        self._move_gradient(resting)

    def _move_gradient(self, resting: StateSlices) -> None:
        """Hold a reduced gradient where it is held from now on."""
        held_S = self.gradient_S
        if held_S is None or resting.holds_gradient is not resting.is_on_accelerator:
            return
        if resting.is_on_accelerator:
            self.gradient_S = held_S.to(self.device, copy=True)
            resting.drop_gradient()
        else:
            self.gradient_S = resting.take_gradient(held_S)

    @contextmanager
    def at_hand(self, *, is_changed: bool = True) -> Generator[None]:
        """Inside, all slices may be read, and written if ``is_changed``. Contexts nest."""
        with ExitStack() as stack:
            for resting in (self.working, self.state):
                if resting is not None:
                    stack.enter_context(resting.at_hand(is_changed=is_changed))
            yield

    def prefetch(self) -> None:
        """Start to bring to hand what rests on disk."""
        for resting in (self.working, self.state):
            if resting is not None:
                resting.prefetch()

    def read_ahead(self) -> bool:
        """Start to read a working slice from disk that is used soon; return whether there is one.

        Where host memory is full it is read when it is used.
        """
        if self.working is None or self.working.is_in_memory:
            return False
        with suppress(BudgetError):
            self.working.prefetch()
        return True

    def forget_reads(self) -> None:
        """Let go of what was read ahead and not used."""
        if self.working is not None:
            self.working.forget_reads()

    @property
    def far_bytes(self) -> int:
        """Host memory that it takes to bring everything to hand."""
        return sum(s.far_bytes for s in (self.working, self.state) if s is not None)

    @property
    def is_update_at_hand(self) -> bool:
        """True while ``update_S`` may be touched."""
        resting = self.state if self.has_master else self.working
        return resting is None or resting.is_at_hand

    @property
    def is_update_on_disk(self) -> bool:
        """True where ``update_S`` comes and goes."""
        resting = self.state if self.has_master else self.working
        return resting is not None and not resting.is_in_memory

    @property
    def is_on_disk(self) -> bool:
        """True where some slice comes and goes."""
        return any(r is not None and not r.is_in_memory for r in (self.working, self.state))

    def fill_own(self, place_S: torch.Tensor) -> torch.Tensor | None:
        """Prepare to send the working slice: return it, or copy it to its place in the chunk."""
        resting = self.working
        if resting is None or resting.is_on_accelerator:
            return self.parameter_S
        with resting.at_hand(is_changed=False):
            place_S.copy_(resting[WORKING])
        return None

    def close(self) -> None:
        """Give the memory of other tiers back."""
        for resting in (self.working, self.state):
            if resting is not None:
                resting.close()

    # ------------------------------------------------------------------ values

    @property
    def parameter_S(self) -> torch.Tensor:
        """The working slice."""
        if self.working is not None:
            return self.working[WORKING]
        assert self._parameter_S is not None
        return self._parameter_S

    @property
    def master_S(self) -> torch.Tensor | None:
        """The master, None where the working slice itself is updated."""
        if self.state is not None:
            return self.state.get(MASTER)
        return self._master_S

    @property
    def state_device(self) -> torch.device:
        """Where updates run."""
        return self.device if self.state is None else self.state.device

    @property
    def has_master(self) -> bool:
        """Whether there is a master, wherever it is."""
        return self._master_S is not None or (self.state is not None and MASTER in self.state)

    @property
    def has_exact_master(self) -> bool:
        """Whether the master says more than the working slice."""
        return self.has_master and self.keeps_masters

    @property
    def update_S(self) -> torch.Tensor:
        """The slice that the optimizer updates: the master where there is one."""
        master_S = self.master_S
        return self.parameter_S if master_S is None else master_S

    @property
    def update_dtype(self) -> torch.dtype:
        """Dtype of ``update_S``, wherever it is."""
        return torch.float32 if self.has_exact_master else self.dtype

    def ensure_master(self) -> None:
        """Make the master of a chunk whose parameters were frozen until now."""
        self.is_updated = True
        if self.has_master or not self._needs_master:
            return
        if self.state is not None:
            self._make_master(None)
        else:
            with self.at_hand(is_changed=False):
                self._master_S = self.parameter_S.float()

    def _make_master(self, exact_S: torch.Tensor | None) -> None:
        """Add a master to the state that rests, from exact values or the working slice."""
        assert self.state is not None
        if MASTER not in self.state:
            self.state.add(MASTER, torch.float32 if self.keeps_masters else self.dtype)
        with self.at_hand():
            self.state[MASTER].copy_(self.parameter_S if exact_S is None else exact_S)

    def take_working(self, elements: slice = EVERYTHING) -> None:
        """Before an update: a master that says no more than the working slice follows it.

        So that writes which autograd does not see, as through ``.data``, are kept.
        """
        if self.has_master and not self.keeps_masters:
            with self.at_hand():
                self.update_S[elements].copy_(self.parameter_S[elements])

    def refresh_working(self, elements: slice = EVERYTHING) -> None:
        """Round the master slice, or some of it, into the working slice."""
        if not self.has_master:
            return
        with self.at_hand():
            master_S, working_S = self.update_S[elements], self.parameter_S[elements]
            if master_S.device != working_S.device:  # fewer bytes travel
                master_S = master_S.to(working_S.dtype)
            working_S.copy_(master_S)

    def refresh_master(self, record: ManagedParameter, *, keeps_exact: bool = True) -> None:
        """Take the owned piece of the master from the working parameter.

        With ``keeps_exact``, elements that round to the working value stay as exact as they are.
        """
        if not self.has_master:
            return
        with self.at_hand():
            piece, working = record.piece_in(self.update_S), record.piece_in(self.parameter_S)
            if piece is not None and working is not None:
                working = working.to(piece.device)
                if keeps_exact:
                    same = piece.to(working.dtype) == working
                    working = piece.where(same, working.to(piece.dtype))
                piece.copy_(working)

    # ------------------------------------------------------------------ gradients

    def keep_gradient(self, mean_S: torch.Tensor) -> None:
        """Hold a reduced gradient, or add it to the one that is held.

        Args:
            mean_S: In the dtype in which gradients are held; the caller's memory, which is kept
                only where the state rests on the accelerator and nothing is held yet.
        """
        if self.state is not None and not self.state.is_on_accelerator:
            self.gradient_S = self.state.take_gradient(mean_S)
        elif self.gradient_S is None:
            self.gradient_S = mean_S
        else:
            self.gradient_S.add_(mean_S)

    @property
    def keeps_gradients_here(self) -> bool:
        """Reduced gradients stay on the accelerator."""
        return self.state is None or self.state.is_on_accelerator

    def drop_gradient(self) -> None:
        """Hold no gradient."""
        self.gradient_S = None
        if self.state is not None:
            self.state.drop_gradient()

    # ------------------------------------------------------------------ accounting

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the slices by purpose, those that rest elsewhere by tier."""
        held: dict[str, list[torch.Tensor]] = {"host": [], "disk": []}
        for resting in (self.working, self.state):
            for what, tensors in (resting.tensors() if resting is not None else {}).items():
                held.setdefault(what, []).extend(tensors)
        gradient_S = self.gradient_S if self.keeps_gradients_here else None
        for purpose, slice_S in (
            ("parameters", self._parameter_S),
            ("masters", self._master_S),
            ("gradients", gradient_S),
        ):
            held.setdefault(purpose, []).extend([] if slice_S is None else [slice_S])
        return held
