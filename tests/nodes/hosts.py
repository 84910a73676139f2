"""Hosts on this machine: network namespaces, joined by a wire that may be slow, lossy, or cut. Linux, as root."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from contextlib import ExitStack
from types import TracebackType

from typing_extensions import Self

#: The device of a host on the wire; gloo is told its name by GLOO_SOCKET_IFNAME.
DEVICE = "wire0"
_PREFIX = "zeroplus"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # from linux/if_tun.h


class HostsUnavailableError(RuntimeError):
    """This machine does not let us make network namespaces."""


class Hosts:
    """Two hosts with a wire between them, or one by itself, for as long as the context lasts.

    Args:
        count: 1 or 2.
        rate: What passes the loopback device of a single host, such as ``"1gbit"``, by ``tc``; None: no limit.
        delay: Seconds a packet takes between two hosts.
        loss: The share of packets that get lost, of 1.

    Raises:
        HostsUnavailableError: On entering, if namespaces cannot be made; none is left.
    """

    def __init__(self, count: int = 2, rate: str | None = None, delay: float = 0.0, loss: float = 0.0) -> None:
        self.names = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(count)]
        self._rate = rate
        self._slow = (delay, loss)
        self._stack = ExitStack()
        self.wire: SlowWire | None = None

    @staticmethod
    def address(host: int) -> str:
        """The address of a host on the wire, the same in every pair of hosts."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *command: str) -> list[str]:
        """``command``, to be run on ``host``."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise HostsUnavailableError("network namespaces need root and iproute2")
        _remove_stale()
        with ExitStack() as stack:
            for name in self.names:
                _ip("netns", "add", name)
                stack.callback(_remove, name)
                _ip("-n", name, "link", "set", "lo", "up")
            if self._rate is not None:
                limit = ("tbf", "rate", self._rate, "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", self.names[0], "qdisc", "add", "dev", "lo", "root", *limit)
            if len(self.names) == 2:
                self._connect(stack)
            self._stack = stack.pop_all()
        return self

    def _connect(self, stack: ExitStack) -> None:
        if any(self._slow):
            self.wire = stack.enter_context(SlowWire(*self._slow))
            for name, device in zip(self.names, self.wire.devices, strict=True):
                _ip("link", "set", device, "netns", name, "name", DEVICE)
        else:
            first, second = self.names
            peer = ("peer", "name", DEVICE, "netns", second)
            _ip("link", "add", DEVICE, "netns", first, "type", "veth", *peer)
        for host, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class SlowWire:
    """Carries packets between two TUN devices, late, and not all of them.

    Not ``tc netem``, which many kernels lack; what is above the device is the kernel's own TCP just as well.

    Args:
        delay: Seconds a packet takes.
        loss: The share of packets that get lost, of 1; which ones, a seeded generator says.

    Attributes:
        devices: The names of the two devices.
        cut: When set, nothing passes any more, and nobody is told.
        passed: How many packets have arrived.
        lost: How many have not.
    """

    def __init__(self, delay: float, loss: float) -> None:
        self.devices = [f"zp{os.getpid()}{end}" for end in "ab"]
        self.cut = threading.Event()
        self.passed = self.lost = 0
        self._delay, self._loss = delay, loss
        self._random = random.Random(0)
        self._files: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True, name="slow-wire")

    def __enter__(self) -> Self:
        try:
            for device in self.devices:
                self._files.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
                fcntl.ioctl(self._files[-1], _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            self._close()
            raise HostsUnavailableError(f"a TUN device cannot be made: {error}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._stop.is_set():
            due = under_way[0][0] - time.monotonic() if under_way else 0.1
            ready, _, _ = select.select(self._files, [], [], min(max(due, 0), 0.1))
            for file in ready:
                try:
                    packet = os.read(file, 65536)
                except OSError:
                    continue  # the device is down
                if self.cut.is_set() or self._random.random() < self._loss:
                    self.lost += 1
                    continue
                other = self._files[1 - self._files.index(file)]
                self.passed += 1
                heapq.heappush(under_way, (time.monotonic() + self._delay, self.passed, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(under_way)
                try:
                    os.write(other, packet)
                except OSError:
                    self.lost += 1


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailableError(f"`{' '.join(command)}` says: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _remove(name: str) -> None:
    for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _remove_stale() -> None:
    """Remove the namespaces of processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        if prefix == _PREFIX and not os.path.exists(f"/proc/{rest.split('-')[0]}"):
            _remove(name)
