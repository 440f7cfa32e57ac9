"""Hosts made of Linux namespaces on this machine, each with its own network, processes, /dev/shm, name and boot id.

      host 0  |eth0 ==rate==\
      host 1  |eth0 ==rate==== bridge
      host 2  |eth0 ==rate==/

They need root, `unshare`, `ip` and `tc`, and end with the process that started them, however it ends. Their congestion
control is that of TCP Reno, which every Linux has, whatever this machine's: BBR slows a connection down for 0.2 s every
10 s to measure the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from types import TracebackType

PORT = 29400
NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

_HOST = """
hostname host{host}
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
echo {boot_id} > /dev/shm/boot_id
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id
echo "127.0.0.1 localhost" > /dev/shm/hosts
for host in $(seq 0 {last_host}); do echo 10.77.0.$((host + 1)) host$host >> /dev/shm/hosts; done
mount --bind /dev/shm/hosts /etc/hosts
echo "hosts: files" > /dev/shm/nsswitch.conf
mount --bind /dev/shm/nsswitch.conf /etc/nsswitch.conf
echo ready
read go
ip link set lo up
ip addr add 10.77.0.{number}/24 dev eth0
ip link set eth0 up
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
tc qdisc add dev eth0 root tbf {limit}
export MASTER_ADDR=10.77.0.1 MASTER_PORT={port} WORLD_SIZE={world_size} GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
export LOCAL_WORLD_SIZE={ranks} LOCAL_RANK=0 FIRST_RANK=$(({host} * {ranks})) RANK=$(({host} * {ranks}))
exec "$@"
"""


def why_no_hosts() -> str | None:
    """Return None if hosts can be made here, else the reason."""
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found; type: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root"
    links = "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1"
    command = ["unshare", *NAMESPACES, "sh", "-ec", f"{links} && tc qdisc add dev v0 root tbf {_limit(100)}"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"namespaces cannot be made: {outcome.stderr.strip()}" if outcome.returncode else None


def _limit(megabits: float) -> str:
    """Return tc's arguments for a link of this rate."""
    return f"rate {megabits}mbit burst {max(128 * 1024, int(megabits * 125))} latency 50ms"


def become_bridge(*command: str) -> None:
    """Replace this process by the command in namespaces of its own, where it can make `Hosts`; its end is theirs."""
    os.execvp("unshare", ["unshare", *NAMESPACES, *command])


class Hosts:
    """Runs a command on each host, with the environment of its ranks: RANK is that of the first, FIRST_RANK.

    Args:
        command: The program and its arguments.
        count: Number of hosts.
        ranks: Ranks of each host.
        megabits: Mbit/s of the link of a host, in each direction.
        name: Name of the bridge, unique among those of this process.

    """

    def __init__(self, command: Sequence[str], *, count: int, ranks: int, megabits: float, name: str = "net") -> None:
        self.name = name
        self.processes: list[subprocess.Popen[str]] = []
        _call(f"ip link add name {name} type bridge")
        _call(f"ip link set {name} up")
        for host in range(count):
            script = _HOST.format(
                host=host,
                number=host + 1,
                boot_id=uuid.uuid4(),
                limit=_limit(megabits),
                port=PORT,
                ranks=ranks,
                last_host=count - 1,
                world_size=count * ranks,
            )
            pipe = subprocess.PIPE
            whole = ["unshare", *NAMESPACES, "sh", "-ec", script, "sh", *command]
            self.processes.append(subprocess.Popen(whole, stdin=pipe, stdout=pipe, text=True))
        for host, process in enumerate(self.processes):
            assert process.stdout is not None
            process.stdout.readline()  # its namespaces exist
            _call(f"ip link add name {name}h{host} type veth peer name eth0 netns {process.pid}")
            _call(f"ip link set {name}h{host} master {name} up")
            _call(f"tc qdisc add dev {name}h{host} root tbf {_limit(megabits)}")
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def link(self, host: int, state: str) -> None:
        """Cut the link of a host (`down`) or mend it (`up`)."""
        _call(f"ip link set {self.name}h{host} {state}")

    def limit(self, host: int, megabits: float) -> None:
        """Change the rate of what a host receives, in Mbit/s."""
        _call(f"tc qdisc change dev {self.name}h{host} root tbf {_limit(megabits)}")

    def vanish(self, host: int) -> None:
        """Cut the link of a host and end all of its processes, as if it had lost its power."""
        self.link(host, "down")
        self.processes[host].kill()

    def read_line(self, host: int) -> str:
        """Return the next line that a host prints; "" at its end."""
        output = self.processes[host].stdout
        assert output is not None
        return output.readline()

    def read_lines(self, host: int) -> list[str]:
        """Return the other lines that a host prints, once its program has ended."""
        output = self.processes[host].stdout
        assert output is not None
        return output.readlines()


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True)
