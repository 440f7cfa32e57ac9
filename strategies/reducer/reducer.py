"""Reducer: gradients summed or averaged over ranks, bucket by bucket, while backward runs.

    backward   |--- w3 --- b3 --- w2 --- b2 --- w1 --- b1 --|
    hooks          v      v |     v      v |     v      v |
    bucket 0       [w3 | b3]==all_reduce==]|              |
    bucket 1                      [w2 | b2]|==all_reduce==|=]
    bucket 2                                     [w1 | b1]|==all_reduce==]
    finish                                                wait 0, wait 1, wait 2

Every rank starts its buckets in the order 0, 1, 2, ..., even if they become ready in another one: started in different
orders, collectives would add up different buckets or wait for each other forever.

Each gradient exists once: the first time it is accumulated it is copied into its bucket, and `.grad` becomes a view of
the bucket, which the reduction overwrites. The first backward is reduced at its end only: meanwhile the Reducer learns
in which order gradients arrive and how often each hook fires; then all ranks take rank 0's order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from trainkit.devices import current_stream, has_streams
from trainkit.distributed.collectives import check_same_model
from trainkit.distributed.failure_store import FailureStore

from ..transports.process_group import CommunicationHook, ProcessGroupTransport, Transport
from ..transports.selection import open_transport
from .bucket import Bucket, GradientEntry, LaunchQueue, ReducerSettings, Unused, make_buckets
from .grad_norm import total_norm, whole_gradients
from .reductions import BucketReductions
from .unused_parameters import BucketFiller, FirstBackwardStats, UnusedParameters, make_plan

__all__ = ["Reducer", "ReducerSettings", "Unused"]

MAX_NAMES = 8  # in a message


class Reducer:
    """Reduces the gradients of the trained `named_parameters` over the ranks of `group`.

    The caller marks each backward that is reduced with `session`, calls `start_on_hook` from a hook of the backward, or
    announces it with `prepare_for_backward`; any other only accumulates gradients on this rank. Ranks publish why they
    fail in `failure_store`; without it in a store for this Reducer alone. `open_transport` returns what sums the
    buckets, given the transport of the process group. `untrained` holds other tensors that must be the same on all
    ranks, by kind.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        group: dist.ProcessGroup,
        settings: ReducerSettings | None = None,
        failure_store: FailureStore | None = None,
        open_transport: Callable[[ProcessGroupTransport], Transport] = open_transport,
        untrained: Mapping[str, Sequence[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """Check that all ranks have the same parameters, and register hooks on them. Collective."""
        self.settings = settings or ReducerSettings()
        self.group, self.world_size = group, group.size()
        self.entries = [GradientEntry(i, name, parameter) for i, (name, parameter) in enumerate(named_parameters)]
        self.parameters = [entry.parameter for entry in self.entries]
        devices = _devices_of(self.parameters)
        self.device = devices[0]
        # In backward each device has a thread, which runs its hooks. Current there for other devices are not the
        # streams of the caller of backward: the thread may launch a bucket of those devices, and not write to it.
        self._fills_in_backward = len(devices) == 1
        self._lock: AbstractContextManager[Any] = threading.RLock() if len(devices) > 1 else nullcontext()
        # Before any bucket exists: ranks with other parameters would add up unrelated gradients, or hang.
        token = check_same_model({"parameter": named_parameters, **(untrained or {})}, group)
        self.failure_store = failure_store or FailureStore(group, token=token)
        collective = ProcessGroupTransport(
            group, failure_store=self.failure_store, device=self.device, timeout_seconds=self.settings.timeout_seconds
        )
        self.transport = open_transport(collective)
        self.reductions = BucketReductions(self.settings, collective)
        scale = 1.0 / self.world_size if self.settings.average else 1.0
        self.filler = BucketFiller(scale=scale, as_view=self.settings.gradient_as_bucket_view)
        self.plan = make_plan(self.entries, settings=self.settings)
        self.buckets: list[Bucket] = []  # made at the end of the first backward
        self.expects_backward = False  # the next backward is reduced, though no session or hook may have started it
        self.step = 0  # reductions so far
        self.after_bucket: Callable[[Bucket], None] | None = None  # called with each reduced bucket, in backward
        self.after_step: list[Callable[[Reducer], None]] = []
        self.awaited: list[torch.futures.Future[Any]] = []  # waited for at the end of the backward
        self.waited_seconds = 0.0  # after backward, in all steps
        self.began_at = self.backward_ended_at = self.ended_at = 0.0  # seconds of time.perf_counter
        self.arrived_at: list[float] = []  # time.perf_counter of each gradient in a step that is recorded; 0.0: none
        self.is_open = False  # True while a backward is expected or under way
        self.was_aborted = False  # the last backward that a hook started ended by an exception
        self._has_begun = False  # open, and the first gradient has arrived
        self._fast = False  # open, buckets exist, and nothing but the buckets waits for gradients
        self._queue = LaunchQueue(self._launch)
        self._num_completed = 0  # buckets whose results are in the gradients
        self._first_backward = FirstBackwardStats(self.entries, settings=self.settings)
        # `.grad` of an earlier step is equal on all ranks: their mean is itself, their sum is a multiple.
        divisor = 1 if self.settings.average else self.world_size
        self._unused = UnusedParameters(
            self.entries, filler=self.filler, queue=self._queue, accumulated_divisor=divisor
        )
        self.failure: str | None = None  # why nothing can be reduced any more
        self._handles = self._register_hooks()

    # ---- Backward passes

    @contextmanager
    def session(self) -> Iterator[None]:
        """Reduce the backward in this context at its end. Collective.

        An exception closes the session; if buckets had been launched, it is published to the other ranks.
        """
        self._follow_hooks()
        self.start()
        try:
            yield
        except BaseException as error:  # also KeyboardInterrupt: ranks that have launched buckets wait for this one
            self.abort(error)
            raise
        self.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients on this rank; the next reduction includes the sum."""
        # Before the backward adds to them: then the sum over ranks of an earlier reduction is still separate.
        self._unused.pre_divide_accumulated()
        yield

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Leave gradients of backwards in this context alone, as if there were no reducer."""
        for handle in self._handles:
            handle.remove()
        try:
            yield
        finally:
            self._handles = self._register_hooks()

    def prepare_for_backward(self, _: object = None) -> None:
        """Reduce the next backward, from its first gradient on, also if it does not reach the outputs."""
        self.expects_backward = True

    def start_on_hook(self, unused: Sequence[int] = ()) -> None:
        """Reduce the backward under way when it ends; called from one of its hooks."""
        with self._lock:
            if self.is_open:
                return
            self.start()
            self.mark_unused(unused)
            finish = partial(self._finish_on_hook)
            # Autograd drops the callback when the backward is over, without a call if an exception ended it.
            # Not at exit: publishing a failure could wait for a store that is gone.
            weakref.finalize(finish, self._abort_unfinished).atexit = False
            # Private: no public hook of torch runs at the end of the whole backward.
            Variable._execution_engine.queue_callback(finish)

    def start(self) -> None:
        """Prepare for a backward that is reduced."""
        if self.failure is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self.failure}")
        self.is_open, self.was_aborted, self._has_begun, self._num_completed = True, False, False, 0
        # Times of gradients only in recorded steps: a list here keeps every hook off its fast path.
        self.arrived_at = [0.0] * len(self.entries) if self.after_step else []
        self.began_at = time.perf_counter()
        self._queue.reset(self.buckets)
        if not self.buckets:
            self._first_backward.reset()
            return
        for entry in self.entries:
            entry.remaining = entry.expected
        self._unused.start()

    def mark_unused(self, unused: Sequence[int]) -> None:
        """Do not wait for the parameters with the indices `unused` in the backward under way."""
        self._unused.marked_unused.update(unused)
        if self.buckets and self._has_begun and self._fills_in_backward:
            self._unused.fill_unused()

    def finish(self) -> None:
        """Leave in every `.grad` the reduction over ranks. Collective; the backward has run.

        A parameter that no rank used keeps its gradient, or none.
        """
        self.backward_ended_at = time.perf_counter()
        try:
            if not self.buckets:
                self._build_buckets()
            else:
                self._unused.fill_unused()
            if not self._queue.is_complete:
                self._fill_missing()
            # Only after the last bucket has started, so that every rank has the same order of collectives.
            self.reductions.run_hooks(self.buckets)
            for bucket in self.buckets[self._num_completed :]:
                self._complete(bucket)
            for future in self.awaited:
                future.wait()
            self.awaited.clear()
        except BaseException as error:
            # Some ranks may have more of the collectives than others: a next step would mix up buckets.
            self.failure = str(error)
            raise
        finally:
            self.is_open = self._fast = self.expects_backward = False
            self._unused.finish()
        self.step += 1
        self.ended_at = time.perf_counter()
        self.waited_seconds += self.ended_at - self.backward_ended_at
        for record in self.after_step:
            record(self)

    def abort(self, error: BaseException | None = None) -> None:
        """Discard the backward under way; launched buckets break the Reducer, and the other ranks learn why."""
        self.is_open = self._fast = False
        # A launched bucket cannot be taken back; before that this rank may still repeat its backward.
        if self._queue.next > 0 and self.world_size > 1:
            self.publish_failure("a backward did not complete" if error is None else f"{type(error).__name__}: {error}")

    def reduce_zeros(self) -> None:
        """Take part in the reduction of the other ranks' backward with zeros. Collective."""
        self._unused.is_shadow = True
        try:
            self.start()
            self.finish()
        finally:
            self._unused.is_shadow = False

    # ---- Settings and results

    def publish_failure(self, why: str) -> None:
        """Publish to the other ranks, waiting or not, that this one stops and why."""
        message = f"rank {self.group.rank()} failed in step {self.step}: {why}"
        self.failure_store.publish(message)
        self.fail(message)

    def fail(self, message: str) -> None:
        """Reduce nothing any more, and tell ranks that wait in the transport why."""
        self.failure = message
        self.transport.fail(message)

    def register_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Reduce the buckets by `hook(state, bucket)`, which leaves the mean over ranks. Once, before training."""
        self.reductions.register_hook(state, hook)
        self.filler.scale = 1.0  # the hook takes the mean itself

    def set_divisor(self, divisor: int) -> None:
        """Divide the next sums over ranks by `divisor`; without effect if a hook is registered."""
        if self.reductions.hook is None:
            self.filler.scale = 1.0 / divisor

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, computed on the flat buckets where `.grad` are their views."""
        return total_norm(whole_gradients(self.buckets, self.parameters), self.device)

    def close(self) -> None:
        """Remove the hooks and close the transport; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.transport.close()

    # ---- Arrival of gradients

    def _register_hooks(self) -> list[RemovableHandle]:
        return [entry.parameter.register_post_accumulate_grad_hook(self._make_hook(entry)) for entry in self.entries]

    def _follow_hooks(self) -> None:
        """Register the hooks again after any that came later: what is reduced is the gradient that all others left."""
        for entry, handle in zip(self.entries, self._handles, strict=True):
            hooks = entry.parameter._post_accumulate_grad_hooks  # torch has no public way to see them
            if next(reversed(hooks)) != handle.id:  # they run in the order of this dict
                for outdated_handle in self._handles:
                    outdated_handle.remove()
                self._handles = self._register_hooks()
                return

    def _make_hook(self, entry: GradientEntry) -> Callable[[Tensor], None]:
        # One closure for each parameter, without calls on its usual path: it runs for each in every backward.
        filler, as_view, multiply = self.filler, self.filler.as_view, torch.mul

        def on_gradient(parameter: Tensor) -> None:
            if not self._fast and not self._should_bucket(entry):
                return
            entry.remaining -= 1
            if entry.remaining:
                # The hook fires several times in a static graph: the gradient is complete at the last one only.
                entry.used_this_backward = True
                if entry.remaining < 0:
                    self._raise_marked_twice(entry)
                return
            gradient, view = parameter.grad, entry.view
            # Sparse, undefined, or with a graph (create_graph=True), into which a copy must not be recorded.
            if view is None or gradient is None or gradient.requires_grad:
                self.filler.fill(entry)
            elif gradient is view:  # autograd has added to the bucket in place
                if filler.scale != 1.0:
                    view.mul_(filler.scale)
            else:
                if filler.scale != 1.0:
                    multiply(gradient, filler.scale, out=view)
                else:
                    view.copy_(gradient)
                if as_view:
                    parameter.grad = view
            bucket = entry.bucket
            bucket.pending -= 1  # type: ignore[union-attr] # buckets exist when `_fast` is set
            if not bucket.pending:  # type: ignore[union-attr]
                bucket.ready_at = time.perf_counter()  # type: ignore[union-attr]
                self._launch_filled()

        if not has_streams(self.device):
            return on_gradient

        lock, device = self._lock, entry.parameter.device

        def on_gradient_of_stream(parameter: Tensor) -> None:
            # Backward of a forward on a side stream runs there: the bucket's launch has to wait for that stream.
            with lock:
                if entry.bucket is not None:
                    entry.bucket.streams.add(current_stream(device))
                on_gradient(parameter)

        return on_gradient_of_stream

    def _should_bucket(self, entry: GradientEntry) -> bool:
        """Return True if a gradient belongs in a bucket: the backward is reduced, and it is not the first.

        The first such gradient fills the entries marked as unused. Before it there may be nothing to reduce at all:
        `torch.autograd.grad` gives no parameter a gradient.
        """
        if not self.is_open:
            if not self.expects_backward:  # in no_sync, or of a forward of the module itself
                # The next reduction includes it, and must not take the parameter for an unused one.
                entry.used_this_backward, entry.accumulated = True, False
                self.filler.move_into_bucket(entry)
                return False
            self.start_on_hook()  # no output of the module was reached, so none of their hooks has started it
        self._has_begun = True
        if self.arrived_at:
            self.arrived_at[entry.index] = time.perf_counter()
        if self.buckets:
            self._fast = not self.arrived_at
            if self._fills_in_backward:
                self._unused.fill_unused()
            return True
        # Other settings tolerate a second firing: the first step learns how many firings to expect.
        if (
            self._first_backward.record(entry) > 1
            and self.settings.find_unused_parameters == "error"
            and not self.settings.static_graph
        ):
            self._raise_marked_twice(entry)
        return False

    def _finish_on_hook(self) -> None:
        """Finish at the end of the backward, unless it gave no parameter a gradient (`torch.autograd.grad`)."""
        if not self.is_open:
            return
        if self._has_begun:
            self.finish()
        else:
            self.abort()

    def _abort_unfinished(self) -> None:
        """Discard the backward under way if `_finish_on_hook` has not ended it."""
        if self.is_open:
            self.was_aborted, self.expects_backward = True, False
            self.abort()

    # ---- Buckets

    def _build_buckets(self) -> None:
        """Make the buckets in rank 0's order of arrival, and fill them with the first gradients. Collective."""
        self._check_unused(self._first_backward.unused())
        self.plan = self._first_backward.make_plan(self.group, self.device)
        self._unused.statically_unused = self._first_backward.statically_unused
        flags = self.settings.find_unused_parameters != "error"
        self.buckets = make_buckets(self.plan, self.entries, self.transport, flags=flags)
        self._queue.reset(self.buckets)
        # Bucket by bucket: gradients that move in free their own memory before the next bucket takes more.
        for bucket in self.buckets:
            if bucket.contents is not None:
                self.transport.reserve(bucket.index)
            for entry in bucket.entries:
                # Also what backwards in no_sync have left before the first reduction.
                entry.used_this_backward = entry.used_this_backward or entry.arrived > 0
                self._unused.fill(entry)
            self._launch_filled()

    def _fill_missing(self) -> None:
        """Fill the entries whose hooks fired less often than expected, and launch the remaining buckets."""
        missing = [entry for bucket in self.buckets if bucket.pending for entry in bucket.entries if entry.remaining]
        self._check_unused([entry for entry in missing if not entry.used_this_backward])
        for entry in missing:
            self._unused.fill(entry)
        self._launch_filled()

    def _launch_filled(self) -> None:
        self._queue.start_filled()
        self.transport.progress()
        if self.after_bucket is not None and self.device.type == "cpu":  # a stream would wait for the bucket
            # All gradients of the bucket are complete, so the rest of backward does not read its parameters.
            while self._num_completed < self._queue.next and self.buckets[self._num_completed].is_done():
                self._complete(self.buckets[self._num_completed])

    def _launch(self, bucket: Bucket) -> None:
        self.reductions.start(
            bucket,
            self.transport,
            where=f"backward of step {self.step}, bucket {bucket.index} of {len(self.buckets)}",
            is_last=bucket.index == len(self.buckets) - 1,
            timed=bool(self.after_step),
        )

    def _complete(self, bucket: Bucket) -> None:
        self._num_completed += 1
        self.reductions.wait(bucket, self.transport)
        for entry in bucket.entries:
            entry.used_this_backward = False
            entry.accumulated = True
        if self.after_bucket is not None:
            self.after_bucket(bucket)

    # ---- Errors

    def _check_unused(self, unused: Sequence[GradientEntry]) -> None:
        # A shadow of the others' backward has no gradients at all, which is no mistake.
        if self.settings.find_unused_parameters != "error" or not unused or self._unused.is_shadow:
            return
        names = ", ".join(repr(entry.name) for entry in unused[:MAX_NAMES])
        more = f" and {len(unused) - MAX_NAMES} more" if len(unused) > MAX_NAMES else ""
        self._raise(
            f"{len(unused)} of {len(self.entries)} parameters got no gradient in this backward: {names}{more}. They "
            "took no part in the loss; set find_unused_parameters=auto (in the drop-in DistributedDataParallel: "
            "find_unused_parameters=True)."
        )

    def _raise_marked_twice(self, entry: GradientEntry) -> NoReturn:
        reason = "Your training graph has changed in this iteration, which static_graph=True rules out: "
        self._raise(
            f"{reason if self.settings.static_graph and self.buckets else ''}parameter {entry.name!r} was marked "
            f"ready twice in one backward ({entry.expected} expected). Expected to mark a variable ready only once. "
            "This happens when a reentrant checkpoint runs a module several times, or when one forward's graph is run "
            "backward in parts; with static_graph=True the number of times is learned from the first step."
        )

    def _raise(self, why: str) -> NoReturn:
        self.publish_failure(why)  # or the other ranks wait until their timeout for buckets that never come
        raise RuntimeError(why)


def _devices_of(parameters: Sequence[nn.Parameter]) -> list[torch.device]:
    """Return the devices of the parameters, in their order; raise if there are none, or devices of several kinds."""
    devices = list(dict.fromkeys(parameter.device for parameter in parameters))
    if not devices:
        raise RuntimeError("there is nothing to reduce: no parameter requires a gradient")
    if len({device.type for device in devices}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"all parameters must be on one kind of device to be reduced together, but are on {names}")
    return devices
