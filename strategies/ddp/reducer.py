"""Gradients summed or averaged over ranks, bucket by bucket, while backward runs.

    backward   |--- w3 --- b3 --- w2 --- b2 --- w1 --- b1 --|
    hooks          v      v |     v      v |     v      v |
    bucket 0       [w3 | b3]==all_reduce==]|              |
    bucket 1                      [w2 | b2]|==all_reduce==|=]
    bucket 2                                     [w1 | b1]|==all_reduce==]
    finish                                                wait 0, wait 1, wait 2

Every rank starts its buckets in the same order, 0, 1, 2, ..., whatever order they became ready in: started in
different orders, collectives would add up different buckets or wait for each other forever.

A gradient is in one place: the first time it is accumulated it is copied into its bucket and `.grad` becomes that
part of the bucket, which the reduction overwrites. The first backward is reduced at its end only: meanwhile the
Reducer learns in which order gradients arrive and how often each hook fires; then the ranks take rank 0's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from trainkit.strategies.ddp.reductions import open_transport

from trainkit.distributed.collectives import check_same_model, only_device
from trainkit.distributed.failure_store import FailureStore

from .bucket import Bucket, GradientEntry, LaunchQueue, ReducerSettings, Unused, make_buckets
from .grad_norm import total_norm, whole_gradients
from .reductions import BucketReductions
from .transport import CommunicationHook
from .unused_parameters import BucketFiller, FirstBackwardStats, UnusedParameters, plan_of

MAX_NAMES = 8  # in a message


def marked_ready_twice_message(slot: GradientEntry, *, has_changed: bool) -> str:
    """Return what to say of a parameter that was ready before; `has_changed`: unlike in a static graph's first step."""
    changed = "Your training graph has changed in this iteration, which static_graph=True rules out: "
    return (
        f"{changed if has_changed else ''}parameter {slot.name!r} got its gradient ready more often than expected in "
        f"one backward ({slot.expected} expected). Expected to mark a variable ready only once. This happens when a "
        "reentrant checkpoint runs a module several times, or when one forward's graph is run backward in "
        "parts; with static_graph=True the number of times is learned from the first step."
    )


def unused_parameters_message(slots: Sequence[GradientEntry], *, num_parameters: int) -> str:
    """Return what to say of parameters that took no part in the loss."""
    names = ", ".join(repr(slot.name) for slot in slots[:MAX_NAMES])
    more = f" and {len(slots) - MAX_NAMES} more" if len(slots) > MAX_NAMES else ""
    return (
        f"{len(slots)} of {num_parameters} parameters got no gradient in this backward: {names}{more}. They took no "
        'part in the loss; allow that with unused="auto" (find_unused_parameters=True in the drop-in '
        "DistributedDataParallel)."
    )


__all__ = ["Reducer", "ReducerSettings", "Unused"]


class Reducer:
    """Reduces the gradients of `named_parameters` over the ranks of `group`.

    Either the caller marks each backward with `session`, or, with `arm`, the backward itself finds its end.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        group: dist.ProcessGroup,
        settings: ReducerSettings | None = None,
        failure_store: FailureStore | None = None,
        untrained: Mapping[str, Sequence[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """Check that all ranks have the same parameters and listen to their gradients. Collective.

        What else must be the same is in `untrained`, by kind. On `failure_store` the ranks tell each other why they
        fail; by default it is one of this Reducer's own.
        """
        self.settings = settings or ReducerSettings()
        self.group, self.world_size = group, group.size()
        self.slots = [GradientEntry(i, name, parameter) for i, (name, parameter) in enumerate(named_parameters)]
        self.parameters = [slot.parameter for slot in self.slots]
        self.device = only_device(self.parameters)
        token = check_same_model({"parameter": named_parameters, **(untrained or {})}, group)
        self.failure_store = failure_store or FailureStore(group, token=token)
        self.transport = open_transport(
            self.settings.transport,
            group=group,
            failure_store=self.failure_store,
            device=self.device,
            timeout_seconds=self.settings.timeout_seconds,
        )
        self.reductions = BucketReductions(
            group, settings=self.settings, failure_store=self.failure_store, device=self.device
        )
        scale = 1.0 / self.world_size if self.settings.average else 1.0
        self.filling = BucketFiller(scale=scale, as_view=self.settings.gradient_as_bucket_view)
        self.plan = plan_of(self.slots, settings=self.settings)
        self.buckets: list[Bucket] = []  # made when the first backward has shown the order
        self.sync = True  # whether a backward is reduced; read when gradients arrive
        self.step = 0  # reductions so far
        self.after_bucket: Callable[[Bucket], None] | None = None  # called once a bucket has its result, in backward
        self.after_step: Callable[[Reducer], None] | None = None
        # - the backward under way
        self._open = False
        self._fast = False  # open, buckets exist, and the first gradient has arrived
        self._queue = LaunchQueue(self._start)
        self._num_completed = 0  # buckets whose results are in the gradients
        self._first = FirstBackwardStats(self.slots, settings=self.settings)
        self.began_at = self.backward_ended_at = self.ended_at = 0.0  # seconds of time.perf_counter
        self.waited_seconds = 0.0  # after backward, in all steps
        self._absences = UnusedParameters(
            self.slots,
            filling=self.filling,
            queue=self._queue,
            divide_carried_by=1 if self.settings.average else self.world_size,
        )
        self._broken: str | None = None
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot in self.slots
        ]

    # ---- The backward passes

    @contextmanager
    def session(self, *, sync: bool = True) -> Iterator[None]:
        """Reduce the backward in this context when it ends, or with `sync=False` only add up; collective if `sync`.

        An exception leaves no session behind; where a reduction was already under way, the others are told.
        """
        if not sync:
            with self.no_sync():
                yield
            return
        self.begin()
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise
        self.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients only add up on this rank; the next reduction takes the sum along."""
        before, self.sync = self.sync, False
        self._absences.pre_divide_accumulated()
        try:
            yield
        finally:
            self.sync = before

    def arm(self, unused: Sequence[int] = ()) -> None:
        """Reduce the backward that is running when it ends; called from one of its hooks."""
        if self._open or not self.sync:
            return
        self.begin()
        self.mark_unused(unused)
        Variable._execution_engine.queue_callback(self._finish_armed)

    def begin(self) -> None:
        """Expect a backward."""
        if self._broken is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._broken}")
        self._open, self._num_completed = True, 0
        self.began_at = time.perf_counter()
        self._queue.begin(self.buckets)
        if not self.buckets:
            self._first.restart()
            return
        for slot in self.slots:
            slot.remaining = slot.expected
        self._absences.begin()

    def mark_unused(self, unused: Sequence[int]) -> None:
        """Do not wait for the parameters `unused`: they are known to take no part in the backward that follows."""
        self._absences.mark(unused)
        if self._fast:
            self._absences.fill_unused()

    def finish(self) -> None:
        """Leave in every `.grad` the reduction over ranks. Collective; the backward has run.

        A parameter that no rank used keeps the gradient it had, or none.
        """
        self.backward_ended_at = time.perf_counter()
        try:
            if not self.buckets:
                self._settle()
            elif not self._fast:
                self._absences.fill_unused()
            if not self._queue.is_complete:
                self._contribute_missing()
            self._wait_for_all()
        except BaseException as error:
            self._broken = str(error)
            raise
        finally:
            self._open = self._fast = False
            self._absences.end()
        self.step += 1
        self.ended_at = time.perf_counter()
        self.waited_seconds += self.ended_at - self.backward_ended_at
        if self.after_step is not None:
            self.after_step(self)

    def abandon(self, error: BaseException | None = None) -> None:
        """Forget the backward under way; if a reduction had begun, no other can follow and the ranks are told why."""
        launched = self._queue.next > 0 and self.world_size > 1
        self._open = self._fast = False
        if launched:
            why = f"{type(error).__name__}: {error}" if error is not None else "a backward did not reach its end"
            self.fail(why)

    def reduce_zeros(self) -> None:
        """Take part in a reduction without gradients of its own: this rank adds zeros. Collective."""
        self._absences.is_shadow = True
        try:
            self.begin()
            self.finish()
        finally:
            self._absences.is_shadow = False

    def _finish_armed(self) -> None:
        """Finish at the end of the backward, unless it gave no parameter a gradient (`torch.autograd.grad`)."""
        if not self._open:
            return
        if self._fast if self.buckets else self._first.moments > 0:
            self.finish()
        else:
            self.abandon()

    @property
    def is_open(self) -> bool:
        """Whether a backward is expected or under way."""
        return self._open

    def fail(self, why: str) -> None:
        """Tell the ranks that wait, or will, that this one stops and why."""
        message = f"rank {self.group.rank()} failed in step {self.step}: {why}"
        self._broken = message
        self.failure_store.publish(message)
        self.transport.fail(message)

    def register_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Let `hook(state, bucket)` reduce the buckets: it leaves the mean over ranks. Once, before training."""
        self.reductions.register_hook(state, hook)
        self.filling.scale = 1.0

    def divide_by(self, ranks: int) -> None:
        """Let the next reductions be sums over ranks divided by `ranks`; a hook divides as it likes."""
        if not self.reductions.has_hook:
            self.filling.scale = 1.0 / ranks

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, computed on the flat buckets where `.grad` lies in them."""
        return total_norm(whole_gradients(self.buckets, self.parameters), self.device)

    def element_size(self, bucket: Bucket) -> int:
        """Return the bytes of one gradient element in a bucket."""
        return bucket.slots[0].parameter.element_size()

    def close(self) -> None:
        """Stop listening to gradients; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.transport.close()

    # ---- Gradients arriving

    def _make_hook(self, slot: GradientEntry) -> Callable[[Tensor], None]:
        # One closure for each parameter, short because it runs once for each in every backward.
        filling, as_view, multiply = self.filling, self.filling.as_view, torch.mul

        def on_gradient(parameter: Tensor) -> None:
            if not (self._fast and self.sync) and not self._should_bucket(slot):
                return
            slot.remaining -= 1
            if slot.remaining:
                self._count_extra_use(slot)
                return
            gradient, view = parameter.grad, slot.view
            if view is None or gradient is None or gradient.requires_grad:
                self.filling.fill(slot)
            elif gradient is view:
                if filling.scale != 1.0:
                    view.mul_(filling.scale)
            else:
                if filling.scale != 1.0:
                    multiply(gradient, filling.scale, out=view)
                else:
                    view.copy_(gradient)
                if as_view:
                    parameter.grad = view
            bucket = slot.bucket
            bucket.pending -= 1  # type: ignore[union-attr] # buckets exist when `_fast` is set
            if not bucket.pending:  # type: ignore[union-attr]
                self._bucket_filled(bucket)  # type: ignore[arg-type]

        if self.device.type != "cuda":
            return on_gradient

        def on_cuda_gradient(parameter: Tensor) -> None:
            if slot.bucket is not None:
                slot.bucket.streams.add(torch.cuda.current_stream(self.device))
            on_gradient(parameter)

        return on_cuda_gradient

    def _should_bucket(self, slot: GradientEntry) -> bool:
        """Note a gradient that only adds up, or is one of the first backward; return whether it is for a bucket.

        The first that is for one lets those follow that are known not to come. Before it there may be nothing to
        reduce at all: `torch.autograd.grad` gives no parameter a gradient.
        """
        if not self.sync:
            slot.touched, slot.carried = True, False
            self.filling.move(slot)
            return False
        if not self._open:
            self.arm()
        if self.buckets:
            self._fast = True
            self._absences.fill_unused()
            return True
        fires = self._first.note(slot)
        if fires > 1 and self.settings.unused == "error" and not self.settings.static_graph:
            self._raise_marked_twice(slot)
        return False

    def _count_extra_use(self, slot: GradientEntry) -> None:
        slot.touched = True
        if slot.remaining < 0:
            self._raise_marked_twice(slot)

    def _bucket_filled(self, bucket: Bucket) -> None:
        bucket.ready_at = time.perf_counter()
        self._launch_ready()

    # ---- Parameters without a gradient

    def _contribute_missing(self) -> None:
        """Fill the places of parameters whose hooks did not fire as often as expected, and launch the rest."""
        missing = [slot for bucket in self.buckets if bucket.pending for slot in bucket.slots if slot.remaining]
        absent = [slot for slot in missing if not slot.touched]
        if self.settings.unused == "error" and absent and not self._absences.is_shadow:
            self._raise_unused(absent)
        for slot in missing:
            self._absences.fill(slot)
        self._launch_ready()

    # ---- Reducing

    def _launch_ready(self) -> None:
        self._queue.start_filled()
        self.transport.progress()
        if self.after_bucket is not None and self.device.type == "cpu":  # a stream would wait for the bucket
            self._complete_done()

    def _start(self, bucket: Bucket) -> None:
        self.reductions.start(
            bucket,
            self.transport,
            where=f"backward of step {self.step}, bucket {bucket.index} of {len(self.buckets)}",
            is_last=bucket.index == len(self.buckets) - 1,
            timed=self.after_step is not None,
        )

    def _complete_done(self) -> None:
        """Leave the results of buckets that have arrived in the gradients, while backward goes on.

        Only for what wants to go on with each: the parameters of a bucket have their whole gradient, so that no
        part of the backward that is still to come reads them.
        """
        while self._num_completed < self._queue.next and self.buckets[self._num_completed].is_done():
            self._complete(self.buckets[self._num_completed])

    def _wait_for_all(self) -> None:
        self.reductions.run_hooks(self.buckets)
        for bucket in self.buckets[self._num_completed : self._queue.next]:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        self._num_completed += 1
        self.reductions.wait(bucket)
        for slot in bucket.slots:
            slot.touched = False
            slot.carried = True
        if self.after_bucket is not None:
            self.after_bucket(bucket)

    # ---- The first backward

    def _settle(self) -> None:
        """Make the buckets in rank 0's order of arrival, and fill them with the first gradients."""
        absent = self._first.absent()
        if self.settings.unused == "error" and absent and not self._absences.is_shadow:
            self._raise_unused(absent)
        self.plan = self._first.agree(self.group, self.device)
        self._absences.never = self._first.unused_here
        self.buckets = make_buckets(self.plan, self.slots, self.transport, flags=self.settings.unused != "error")
        self._queue.begin(self.buckets)
        for bucket in self.buckets:
            if bucket.contents is not None:
                self.transport.reserve(bucket.index)
            for slot in bucket.slots:
                slot.touched = slot.touched or slot.arrived > 0
                self._absences.fill(slot)
            self._launch_ready()

    # ---- Mistakes

    def _raise_marked_twice(self, slot: GradientEntry) -> NoReturn:
        self._raise(marked_ready_twice_message(slot, has_changed=self.settings.static_graph and bool(self.buckets)))

    def _raise_unused(self, slots: Sequence[GradientEntry]) -> NoReturn:
        self._raise(unused_parameters_message(slots, num_parameters=len(self.slots)))

    def _raise(self, why: str) -> NoReturn:
        self.fail(why)
        raise RuntimeError(why)
