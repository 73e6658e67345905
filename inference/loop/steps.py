"""The steps of one phase, for several clients side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.fast.replay import Replay
from pyrofl.inference.loop.feed import Feed
from pyrofl.inference.loop.noise import AHEAD, ClientNoise
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.optim import narrow
from pyrofl.nets.stacked import LARGE
from pyrofl.tensors import Tensors, cut, pick, under


class PhaseRun:
    """One phase on clients sorted by number of steps.

    The active clients are a prefix, `now`: views of the first rows of `local`, which optimisers
    and moves overwrite in place. A client that has finished is no longer in it and keeps its rows.
    """

    def __init__(
        self,
        method: Method,
        phase: Phase,
        received: Tensors,
        local: Tensors,
        who: Who,
        noise: Sequence[Generator],
    ) -> None:
        """Begin where `local` stands, which is not changed."""
        self.method, self.phase, self.received, self.who = method, phase, received, who
        self.noise = ClientNoise(noise, AHEAD)
        steps = [move for move in phase.moves if isinstance(move, Step)]
        moving = [pick(local, step.names) for step in steps]
        for step, mine in zip(steps, moving, strict=True):
            if not mine:
                raise ValueError(
                    f"no local tensor matches {step.names!r}; there are {sorted(local)}"
                )
        self.owned = {n for mine in moving for n in mine}
        self.local = {
            n: v.clone(memory_format=torch.contiguous_format) if n in self.owned else v
            for n, v in local.items()
        }
        self.now = self.local
        self.params = [{n: self.local[n].detach() for n in mine} for mine in moving]
        self.optimisers = [
            step.optim([p.requires_grad_() for p in mine.values()])
            for step, mine in zip(steps, self.params, strict=True)
        ]
        self.once = False  # whether no tensor is written into, as moves run once, for all clients
        self.ones = torch.ones_like(who.size)
        self.total = {step.names: torch.zeros_like(who.size) for step in steps}
        self.first = {n: torch.full_like(v, torch.nan) for n, v in self.total.items()}
        self.waiting = {*self.first}  # for their first step
        self.again = [Replay(method, phase, step, self.noise) for step in steps]
        parts = zip(self.again, self.params, self.optimisers, strict=True)
        self.ready = [again.begins(mine, optimiser) for again, mine, optimiser in parts]

    def go(self, steps: Tensor, feed: Feed) -> None:
        """Make the steps of every client, [C] with the most first."""
        self.once = not self.params and bool((steps == 1).all())
        times = torch.arange(int(steps.max()))
        t, left = 0, (steps > times[:, None]).sum(1).tolist()
        for active, alike in Counter(left).items():
            if active < len(steps):
                self._narrow(active)
            for done, batch in enumerate(feed(t, active, alike)):
                self._moves(batch, t + done > 0, alike - done)
            t += alike

    def _narrow(self, active: int) -> None:
        """Go on with the first clients only."""
        self.now = cut(self.local, slice(active))
        self.received = cut(self.received, slice(active))
        self.noise.narrow(active)
        for optimiser, again in zip(self.optimisers, self.again, strict=True):
            narrow(optimiser, active)
            again.forget()

    def _moves(self, batch: Batch, begun: bool, ahead: int) -> None:
        """Make the moves of a time, the first of so many with these clients."""
        gradient = iter(zip(self.params, self.optimisers, self.again, self.ready, strict=True))
        for move in self.phase.moves:
            if isinstance(move, Step):
                params, optimiser, again, ready = next(gradient)
                written = partial(self._step, move, params, optimiser, batch)
                for i in range(move.repeat):
                    usual = begun or (ready and (i > 0 or move.repeat == 1))
                    if usual and len(self.again) == len(self.phase.moves):
                        touched = partial(self._touched, move, params, optimiser)
                        again.make(written, touched, batch, ahead * move.repeat - i)
                        if move.names in self.waiting:
                            self._note(move, self.total[move.names][: len(batch)])
                    else:
                        written()
                        again.begun(params)
                continue
            with self.noise:
                changed = move(self.received, self.now, batch)
            if not self.once:  # a move may return tensors that others of its writes overwrite
                changed = {n: v.clone() for n, v in changed.items()}
            for name, value in changed.items():
                self._write(name, value.detach())

    def _touched(
        self, step: Step, params: Tensors, optimiser: torch.optim.Optimizer
    ) -> tuple[Tensors, Tensors, Tensors]:
        """Return what a step writes into, and reads besides the batch; see `Touched`."""
        active = slice(len(next(iter(params.values()))))
        states = {
            f"{m} of {n}": v for n, p in params.items() for m, v in optimiser.state[p].items()
        }
        moving = {n: p.detach() for n, p in params.items()}
        moving |= {n: v for n, v in states.items() if v is not None}
        moving |= {"total": self.total[step.names][active]}
        others = {n: v for n, v in self.now.items() if n not in params}
        placed = {n: v for n, v in others.items() if n in self.owned}
        still = {n: v for n, v in others.items() if n not in self.owned}
        still |= under("received", self.received) | {"ones": self.ones[active]}
        return moving, placed, still

    def _step(
        self, step: Step, params: Tensors, optimiser: torch.optim.Optimizer, batch: Batch
    ) -> None:
        programs = self.method.model, self.method.guide
        # New leaves: autograd remembers the shape of one as long as any graph of it lives, and
        # `vmap` leaves graphs to the garbage collector, while `_narrow` shortens the parameters.
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with self.noise:
            loss = step.loss(*programs, self.received, self.now | leaves, batch)
        if loss.shape != batch.size.shape:
            raise ValueError(
                f"the loss of step {step.names!r} has shape {list(loss.shape)}; expected one "
                f"number for each of {len(batch)} clients"
            )
        moving, ones = list(leaves.values()), self.ones[: len(loss)]
        grads = torch.autograd.grad(loss, moving, ones, allow_unused=True, materialize_grads=True)
        for (name, p), grad in zip(params.items(), grads, strict=True):
            if p.dim() and not optimiser.state.get(p):
                self._lay_out(name, p, grad)
            # Fused optimisers of torch take it for granted that both lie alike.
            p.grad = grad if lies_as(grad, p) else torch.empty_like(p).copy_(grad)
        optimiser.step()
        for p in params.values():
            p.grad = None  # so that the next gradients take this memory, still in the cache
        self._note(step, loss.detach())
        self.total[step.names][: len(loss)].add_(loss.detach(), alpha=1 / step.repeat)

    def _note(self, step: Step, loss: Tensor) -> None:
        """Note the loss of a first step."""
        if step.names in self.waiting:
            self.waiting.remove(step.names)
            self.first[step.names][: len(loss)] = loss

    def _lay_out(self, name: str, p: Tensor, grad: Tensor) -> None:
        """Let a parameter lie in memory as its gradients do; optimisers are three times faster."""
        others = zip(self.optimisers, self.params, strict=True)
        if any(name in mine and other.state.get(mine[name]) for other, mine in others):
            return  # what another optimiser remembers lies as the parameter does now
        strides = (p[0].numel(), *torch.empty_like(grad[0]).stride())
        if strides != p.stride() and p[0].numel() >= LARGE:  # or a copy of the gradient is cheap
            whole = self.local[name]
            self.local[name] = torch.empty_strided(
                whole.shape, strides, dtype=whole.dtype, device=whole.device
            ).copy_(whole)
            self.now[name] = self.local[name][: len(p)]
            for params in self.params:  # of every step that moves it
                if name in params:
                    params[name].data = self.now[name]

    def _write(self, name: str, value: Tensor) -> None:
        """Set a local tensor of the active clients; who overwrites later ones copies first."""
        old = self.local.get(name)
        stepped = any(name in params for params in self.params)
        if len(value) == len(self.who.ids) and not stepped:
            self.local[name] = self.now[name] = value
            self.owned.add(name)
            return
        if old is None:
            raise ValueError(f"a client that makes no step in this phase would lack {name!r}")
        if name not in self.owned:
            self.local[name] = old.clone(memory_format=torch.contiguous_format)
            self.owned.add(name)
        self.local[name][: len(value)].copy_(value)
        self.now[name] = self.local[name][: len(value)]

    def losses(self, steps: Tensor) -> Tensors:
        """Return the mean loss per step of every gradient move, by its names: [C]."""
        return {n: v / steps.clamp(min=1).to(v) for n, v in self.total.items()}


def lies_as(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors of one shape lie alike in memory; an axis of one entry is nowhere."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(a == b for n, a, b in strides if n > 1)
