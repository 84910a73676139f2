"""Stage 3: every parameter is partitioned by itself, and gathered where a module uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_zeroplus.plan.estimate import Collective, Estimate, Kind
from lightning_zeroplus.plan.model import Weight, casts, elements, largest
from lightning_zeroplus.plan.zero import FP32, Zero

# DeepSpeed's defaults, in elements.
_PERSISTENT, _REUSE, _LIVE, _PREFETCH, _SUB_GROUP = 100_000, 10**9, 10**9, 5 * 10**7, 10**9


def stage3(zero: Zero) -> Estimate:
    """Stage 3."""
    model, optimized = zero.model, zero.optimized
    parts = [sum(_part(weight, zero.ranks) for weight in group) for group in model.grouped()]
    states, needed, notes = zero.needs(parts)
    states += sum(parts) * zero.master
    own = sum(_part(weight, zero.ranks) * _itemsize(zero, weight) for weight in model.weights)
    averages = sum(parts) * zero.sum
    host = 0
    if zero.offload:
        # Besides states and averages: the weights, and gradients of the master weights.
        host = states + own + averages + sum(parts) * FP32
        states = own = averages = 0
    gathers = _gathers(zero)
    weights = own + model.buffers + gathers.small
    common = {"weights": weights, "states": states, "gradients": averages}
    arriving = largest(optimized, zero.sum_dtype)
    copy = max(casts(model, model.weights), default=0)  # upstream's linear layer keeps none for its backward
    padded = sum(_part(weight, zero.ranks) for weight in optimized) * zero.ranks
    widest = max((_part(weight, zero.ranks) for weight in optimized), default=0) * zero.ranks
    fills = max(min(zero.bucket, padded), widest) * zero.wire
    bucket = zero.bucket * zero.wire if zero.settings.zero("contiguous_gradients", True) else 0
    moments: dict[str, dict[str, int]] = {}
    if zero.window:
        sums = elements(optimized) * zero.sum
        moments["forward"] = {**common, "working": gathers.first + copy}
        if zero.backwards > 1:
            moments["later forwards"] = {**common, "window": sums, "working": gathers.later + copy}
        moments["backward"] = {**common, "window": sums, "working": gathers.at_reductions + arriving + copy}
        moments["reduction"] = {**common, "window": sums, "buckets": fills}
        bucket = 0
    else:
        most = max(gathers.first, gathers.later)
        moments["forward"] = {**common, "buckets": bucket, "working": most + copy}
        # A bucket is copied once more to be reduced; a larger gradient waits outside of it, until the next one comes.
        working = gathers.at_reductions + fills + copy + arriving * (2 if widest > zero.bucket else 1)
        moments["backward"] = {**common, "buckets": bucket, "working": working}
    limit = int(zero.settings.zero("sub_group_size", _SUB_GROUP))
    if zero.compares:
        waiting = {"window": elements(optimized) * zero.sum} if zero.settings.always_waits else {}
        compared = max(_sub_groups([_part(weight, zero.ranks) for weight in optimized], limit), default=0)
        moments["masters"] = {**common, **waiting, "buckets": bucket, "working": zero.comparing(compared)}
    # Small weights are released for a step, too.
    moments["step"] = {
        **common,
        "weights": weights - gathers.small,
        "buckets": bucket,
        **_step(zero, parts, needed, limit),
    }
    kind: Kind = "reduce_scatter" if zero.settings.zero("reduce_scatter", True) else "all_reduce"
    reductions = 1 if zero.window else zero.backwards
    count, payload = _buckets(zero)
    wire = [
        Collective(kind, "gradients", reductions * count, reductions * payload * zero.wire, not zero.window),
        *gathers.collectives(),
    ]
    name = "zeroplus_stage3" + ("_offload" if zero.offload else "")
    between = weights + states + averages + bucket
    return Estimate(name, zero.window, zero.ranks, moments, between, host, tuple(wire), notes)


def _part(weight: Weight, ranks: int) -> int:
    """Elements of a partition."""
    return -(-weight.numel // ranks)


def _itemsize(zero: Zero, weight: Weight) -> int:
    return (zero.low or weight.dtype).itemsize


def _buckets(zero: Zero) -> tuple[int, int]:
    """Reductions of a backward, and their elements, if buckets are filled in the reverse order of the parameters."""
    count, filled, padded = 0, 0, 0
    for weight in reversed(zero.optimized) if not zero.window else zero.optimized:
        if filled and filled + weight.numel > zero.bucket:
            count, filled = count + 1, 0
        filled += weight.numel
        padded += _part(weight, zero.ranks) * zero.ranks
    return count + bool(filled), padded if zero.settings.zero("reduce_scatter", True) else elements(zero.optimized)


def _step(zero: Zero, parts: Sequence[int], working: Sequence[int], limit: int) -> dict[str, int]:
    """What a step needs besides the averages: sub-groups of each group take turns."""
    if zero.offload:
        return {}
    most = 0
    for group, part, needed in zip(zero.model.grouped(), parts, working, strict=True):
        if not part:
            continue
        sub_group = max(_sub_groups([_part(weight, zero.ranks) for weight in group], limit))
        copy = sub_group * FP32 if zero.sum < FP32 else 0
        most = max(most, copy + -(-needed * sub_group // part))
    return {"working": most}


def _sub_groups(parts: Sequence[int], limit: int) -> Iterator[int]:
    """Elements of each of upstream's sub-groups."""
    filled = 0
    for part in parts:
        filled += part
        if filled >= limit:
            yield filled
            filled = 0
    if filled:
        yield filled


class _Gathers(NamedTuple):
    """Which weights are gathered when.

    Attributes:
        small: Bytes of small weights, which are always there.
        first: The most bytes of other gathered weights in the first forward.
        later: The same in later forwards.
        at_reductions: The same when gradients are reduced in a backward.
        in_backwards: Gathers in the forwards and backwards of a step, and their bytes.
        after_step: Gathers of small weights after a step, one by one, and their bytes.
    """

    small: int
    first: int
    later: int
    at_reductions: int
    in_backwards: tuple[int, int]
    after_step: tuple[int, int]

    def collectives(self) -> Iterator[Collective]:
        """What is gathered in a step."""
        if self.in_backwards[0]:
            yield Collective("all_gather", "weights", *self.in_backwards, True)
        if self.after_step[0]:
            yield Collective("all_gather", "weights", *self.after_step, False)


def _gathers(zero: Zero) -> _Gathers:
    """What is gathered, if the modules run once in a forward, in the order of their parameters."""
    settings = zero.settings
    threshold = int(settings.zero("stage3_param_persistence_threshold", _PERSISTENT))
    limits = Limits(
        int(settings.zero("stage3_prefetch_bucket_size", _PREFETCH)),
        int(settings.zero("stage3_max_reuse_distance", _REUSE)),
        int(settings.zero("stage3_max_live_parameters", _LIVE)),
        zero.bucket,
    )
    modules: dict[str, list[Use]] = {}
    small: list[tuple[int, int]] = []
    for weight in zero.model.weights:
        item = (zero.low or weight.dtype).itemsize
        padded, stays = _part(weight, zero.ranks) * zero.ranks * item, weight.numel <= threshold
        modules.setdefault(weight.name.rpartition(".")[0], []).append(Use(weight.numel, padded, stays))
        if stays:
            small.append((weight.numel * item, padded))
    # In manual optimization one call of the engine has all backwards of a step.
    rounds = zero.backwards if zero.model.is_manual else 1
    trace = Trace(list(modules.values()), rounds, limits)
    times = zero.backwards // rounds
    return _Gathers(
        sum(whole for whole, _ in small),
        trace.forwards[0],
        max(trace.forwards[1:]) if rounds > 1 else trace.forwards[0] if zero.backwards > 1 else 0,
        trace.at_reductions,
        (times * trace.count, times * trace.payload),
        (len(small), sum(padded for _, padded in small)),
    )


# -- when weights are gathered and released: upstream's coordinator, played on the order of the modules ---------------


class Use(NamedTuple):
    """A weight, as the coordinator sees it.

    Attributes:
        numel: Its elements.
        gathered: Bytes of the whole weight, padded.
        stays: Whether it is small, and always there.
    """

    numel: int
    gathered: int
    stays: bool


class Limits(NamedTuple):
    """Settings of the coordinator, in elements.

    Attributes:
        ahead: ``stage3_prefetch_bucket_size``.
        reuse: ``stage3_max_reuse_distance``.
        live: ``stage3_max_live_parameters``.
        bucket: ``reduce_bucket_size``.
    """

    ahead: int
    reuse: int
    live: int
    bucket: int


class Trace:
    """The gathers from one ``reset_step`` of the coordinator to the next.

    Upstream knows the order of the modules after two steps. It gathers ahead, up to a bucket, and keeps a weight that
    is used again within ``stage3_max_reuse_distance`` elements, or that the look ahead has passed as already there.

    Args:
        modules: The weights of each module, in the order of a forward. A module without weights comes before each
            forward and backward: the one around them.
        rounds: Forwards, each with its backward.
        limits: The settings.

    Attributes:
        count: Gathers.
        payload: Their bytes.
        forwards: For each forward, the most bytes of gathered weights, with the copies of those that arrive.
        at_reductions: The most bytes of gathered weights when a reduction bucket is full, or a backward ends.
    """

    def __init__(self, modules: Sequence[Sequence[Use]], rounds: int, limits: Limits) -> None:
        self.count = self.payload = self.at_reductions = self._most = 0
        self.forwards: list[int] = []
        self._limits = limits
        self._uses = [use for module in modules for use in module]
        numbers = iter(range(len(self._uses)))
        forward = [[next(numbers) for _ in module] for module in modules]
        self._order = [[], *([*([], *forward), *([], *reversed(forward))] * rounds)]
        self._queue = deque((weight, step) for step, module in enumerate(self._order) for weight in module)
        self._there = {number for number, use in enumerate(self._uses) if use.stays}
        self._arriving: dict[int, list[int]] = {}  # each weight of a gather that is under way: all of them
        self._seen = dict.fromkeys(range(len(self._uses)), -1)
        self._now = self._elements = 0
        filled, length = 0, 1 + len(forward)
        for step, module in enumerate(self._order):
            turn, place = divmod(step - 1, length)
            self._fetch(step, module)
            if turn % 2 == 0:
                self._release(step, module)
                if place == length - 1:
                    self.forwards.append(self._most)
                    self._most = self._now
                continue
            for weight in reversed(module):
                if filled and filled + self._uses[weight].numel > limits.bucket:
                    self.at_reductions, filled = max(self.at_reductions, self._now), 0
                filled += self._uses[weight].numel
            self._release(step, module)
            if place == length - 1 and turn >= 0:
                # Its input needs no gradient, so that upstream sees no end of its backward: it is always released.
                self._drop({weight for weight in module if not self._uses[weight].stays})
                self.at_reductions, filled = max(self.at_reductions, self._now), 0
                self._most = self._now

    def _fetch(self, step: int, module: Sequence[int]) -> None:
        self._gather([weight for weight in module if weight not in self._there and weight not in self._arriving])
        for weight in module:
            self._wait(weight)
        for _ in [weight for weight in module if self._seen[weight] < step]:
            weight, used = self._queue.popleft()
            self._seen[weight] = used
        ahead, elements = dict[int, None](), 0
        limit = min(self._limits.live - self._elements, self._limits.ahead)
        while self._queue and elements < limit:
            weight, used = self._queue.popleft()
            self._seen[weight] = max(self._seen[weight], used)
            if weight not in self._there and weight not in self._arriving and weight not in ahead:
                ahead[weight] = None
                elements += self._uses[weight].numel
        self._gather(list(ahead))

    def _gather(self, weights: list[int]) -> None:
        if not weights:
            return
        size = sum(self._uses[weight].gathered for weight in weights)
        self.count, self.payload = self.count + 1, self.payload + size
        self._elements += sum(self._uses[weight].numel for weight in weights)
        self._add(size)
        self._arriving.update(dict.fromkeys(weights, weights))

    def _wait(self, weight: int) -> None:
        together = self._arriving.get(weight)
        if together is None:
            return
        size = sum(self._uses[each].gathered for each in together)
        if len(together) > 1:  # each is copied out of the buffer of all
            self._add(size)
            self._add(-size)
        for each in together:
            del self._arriving[each]
        self._there.update(together)

    def _release(self, step: int, module: Sequence[int]) -> None:
        going = {weight for weight in module if not self._uses[weight].stays and self._seen[weight] <= step + 1}
        passed = 0
        for later in self._order[step + 1 :]:
            if passed >= self._limits.reuse or not going:
                break
            going.difference_update(later)
            passed += sum(self._uses[weight].numel for weight in later)
        self._drop(going)

    def _drop(self, weights: set[int]) -> None:
        for weight in weights & self._there:
            self._there.remove(weight)
            self._elements -= self._uses[weight].numel
            self._add(-self._uses[weight].gathered)

    def _add(self, size: int) -> None:
        self._now += size
        self._most = max(self._most, self._now)
