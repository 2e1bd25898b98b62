"""A lab's links are as slow as they say, its counters count, and nothing of it is ever left.

All of it happens in namespaces that the tests make; no address outside is used.
"""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinwire.errors import MissingExtraError
from thinwire.lab import (
    HostFailedError,
    Lab,
    LabError,
    Loopback,
    RunTimeoutError,
    parse_rate,
    why_not,
)

PYTHON = (sys.executable, "-I", "-S", "-c")  # without site-packages: starts in 15 ms
NOBODY = 65534
marks = itertools.count()

# Both send at once, each as many bytes as its argument says. Prints the bits a second that came
# over the link, from its own counter, between a tenth and nine tenths of the way: of all that time,
# and of the best tenth of a second in it. On a busy machine programs wait for a processor and leave
# the link idle meanwhile, so the former may be any bit too low, though never too high.
EXCHANGE = """
import os, socket, sys, threading, time
mine, theirs = map(int, sys.argv[1:] if os.environ["RANK"] == "0" else sys.argv[:0:-1])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(where).accept()
else:
    while True:
        try:
            peer = socket.create_connection(where)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
peer.sendall(b"!")
peer.recv(1)
def look():
    while True:
        began = time.monotonic()
        line = next(line for line in open("/proc/net/dev") if "wire0" in line)
        if time.monotonic() - began < 0.005:
            return 8 * int(line.split()[1]), began
sending = threading.Thread(target=lambda: peer.sendall(bytes(mine)))
sending.start()
left, looks = theirs, []
while left:
    left -= len(peer.recv(min(left, 2**15)))
    if 0.1 * theirs < left < 0.9 * theirs:
        looks.append(look())
def rate(first, last):
    return (last[0] - first[0]) / (last[1] - first[1])
if looks:
    pairs = ((a, next((b for b in looks if b[1] >= a[1] + 0.1), None)) for a in looks)
    print(rate(looks[0], looks[-1]), max((rate(a, b) for a, b in pairs if b), default=0))
sending.join()
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
"""


pytestmark = pytest.mark.usefixtures("possible")


@pytest.fixture(scope="module")
def lab(possible):
    # A short queue: TCP fills it soon in both directions, and it is the link that is tested here.
    with Lab(hosts=2, link="20mbit", queue_seconds=0.02) as lab:
        yield lab


@pytest.fixture(params=["lab", "loopback"])
def cluster(request, lab):
    """Whatever runs programs does it in the same way."""
    if request.param == "lab":
        yield lab
    else:
        with Loopback(hosts=2) as loopback:
            yield loopback


def shell(script):
    return ["sh", "-c", script]


def new_mark():
    """An argument for sleep by which its process can be told from all others."""
    return f"3600.{os.getpid()}{next(marks):04d}"


def processes_with(text):
    """The command lines of all processes in which this text stands."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found


def sleepers(mark):
    """How many sleep, not counting those who will: shells and what brings a program into a host."""
    return sum(command.startswith("sleep ") for command in processes_with(mark))


def users_of(namespaces):
    """What keeps these namespaces alive: processes in them and files open on them."""
    found = []
    links = itertools.chain(Path("/proc").glob("[0-9]*/ns/net"), Path("/proc").glob("[0-9]*/fd/*"))
    for link in links:
        try:
            if os.readlink(link) in namespaces:
                found.append(str(link))
        except OSError:
            continue
    return found


def wait_until(condition):
    """Comes back when the condition holds; the time limit of all tests ends it if it never does."""
    while not condition():
        time.sleep(0.02)


# Rates


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("100mbit", 10**8), ("1gbit", 10**9), (" 1.5 Gbit/s", 15 * 10**8), ("64kbit", 64_000)],
)
def test_rates_are_read(rate, bits):
    assert parse_rate(rate) == bits


@pytest.mark.parametrize("rate", ["", "100", "mbit", "100mbps", "100MB", "-1mbit", "1e3mbit", "1m"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="a rate is a number and one of bit, kbit, mbit, gbit"):
        parse_rate(rate)


@pytest.mark.parametrize("rate", ["1kbit", "100gbit", "0mbit"])
def test_rates_out_of_range_are_refused(rate):
    with pytest.raises(ValueError, match="from 10kbit to 10gbit"):
        parse_rate(rate)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hosts": 0}, ValueError, "hosts must be from 1 to 250, got 0"),
        ({"hosts": 2.0}, TypeError, "hosts must be a number of hosts"),
        ({"hosts": 2, "link": "fast"}, ValueError, "a rate is a number"),
        ({"hosts": 2, "link": 100}, TypeError, "link must be a rate"),
        ({"hosts": 2, "link": ["1mbit"] * 3}, ValueError, "one for each of 2 hosts"),
        ({"hosts": 2, "burst_bytes": 1000}, ValueError, "burst_bytes must hold two"),
        ({"hosts": 2, "queue_seconds": 0}, ValueError, r"queue_seconds must be in \(0, 10\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Lab(**arguments)


def test_a_lab_that_is_not_open_says_so():
    for closed in (Lab(hosts=2), Loopback(hosts=2)):
        with pytest.raises(LabError, match="not open: with"):
            closed.run(["true"])


def test_what_a_host_lacks_is_refused(lab):
    with pytest.raises(ValueError, match="host must be from 0 to 1, got 2"):
        lab.set_link(2, "10mbit")
    with pytest.raises(FileNotFoundError, match="host 0: no program 'no-such-program'"):
        lab.run(["no-such-program"])


def test_one_rack_has_no_uplink(lab):
    assert [host.rack for host in lab.hosts] == [0, 0]
    assert lab.inter_counters() == []
    with pytest.raises(ValueError, match="this lab has one"):
        lab.set_inter("10mbit")


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'thinwire\[lab\]'"), Lab(hosts=1):
        pass
    assert "pyroute2" in why_not()


def test_why_not_gives_the_reason(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in why_not()


# Links


def exchange(lab, size, back=None):
    """((mean and best bits a second), bytes) that came over the links, both used at once."""
    back = size if back is None else back
    before = lab.counters()
    results = lab.run([*PYTHON, EXCHANGE, str(size), str(back)])
    carried = [last - first for last, first in zip(lab.counters(), before, strict=True)]
    return [
        ([float(word) for word in r.stdout.split()], c.received_bytes)
        for r, c in zip(results, carried, strict=True)
    ]


def check_rate(lab, bits, size, back=None, tolerance=0.05):
    """The directions in use have their rate: none is ever faster, and each reaches it.

    A machine that is busy with other things may need more than one try for the latter.
    """
    while True:
        found = [[rate / bits for rate in rates] for rates, _ in exchange(lab, size, back)]
        used = [rates for rates in found if rates]
        assert all(mean <= 1 + tolerance for mean, _ in used), found
        if all(best >= 1 - tolerance for _, best in used):
            return


def test_links_have_their_rate_both_ways_and_change_it(lab):
    check_rate(lab, 20e6, 2_000_000)
    lab.set_link(0, "60mbit")
    lab.set_link(1, "60mbit")
    check_rate(lab, 60e6, 6_000_000)
    lab.set_link(1, "20mbit")  # the slower end of a path decides
    check_rate(lab, 20e6, 2_000_000, back=0)
    lab.set_link(0, "20mbit")


def test_each_host_can_have_a_rate_of_its_own():
    with Lab(hosts=2, link=["100mbit", "10mbit"]) as lab:
        # One way: acknowledgements that wait behind data make TCP itself uneven at first.
        check_rate(lab, 10e6, 1_000_000, back=0)


def test_counters_count_what_was_sent(lab):
    # Packets are counted one by one: 1448 of 1514 bytes are payload. On top come acknowledgements
    # of the other direction, 66 bytes for one packet at most, though two usually share one.
    size = 1_000_000
    full = size * 1514 / 1448
    for _, carried in exchange(lab, size):
        assert full <= carried <= full * (1 + 66 / 1514) * 1.01


def test_a_program_sees_its_own_counters_and_nobody_else_talks():
    with Lab(hosts=2) as lab:
        assert {(c.sent_bytes, c.received_bytes) for c in lab.counters()} == {(0, 0)}
        exchange(lab, 100_000)
        lines = [r.stdout for r in lab.run(shell("grep wire0 /proc/net/dev"))]
        inside = [[int(word) for word in line.split()[1:]] for line in lines]
        outside = lab.counters()
    assert [(n[0], n[1], n[8], n[9]) for n in inside] == [
        (c.received_bytes, c.received_packets, c.sent_bytes, c.sent_packets) for c in outside
    ]


def test_a_host_reaches_its_lab_only(lab):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=5)
except ConnectionRefusedError:
    print(*sorted(name for _, name in socket.if_nameindex()))
    print(*(line.split()[1] for line in open("/proc/net/route").readlines()[1:]))
"""
        for result in lab.run([*PYTHON, probe]):
            assert result.stdout.splitlines() == ["lo wire0", "00004D0A"]  # 10.77.0.0, no default


# Programs


def test_each_program_knows_its_place(lab):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MINE")
    script = f"echo {' '.join(f'${name}' for name in names)} $GLOO_SOCKET_IFNAME; echo late >&2"
    heard = []
    results = lab.run(shell(script), env={"MINE": "x"}, on_line=lambda *what: heard.append(what))
    said = [f"{rank} 2 0 1 {lab.hosts[0].address} x wire0" for rank in range(2)]
    assert [(r.host, r.exit_code, r.stdout, r.stderr) for r in results] == [
        (rank, 0, f"{said[rank]}\n", "late\n") for rank in range(2)
    ]
    assert sorted(heard) == sorted(
        what
        for rank in range(2)
        for what in ((rank, "stdout", said[rank]), (rank, "stderr", "late"))
    )


def test_long_output_and_a_last_line_without_end_arrive(cluster):
    results = cluster.run(
        [*PYTHON, "print('x' * 99 + '\\n' * 1, end='') or print('y' * 10**6, end='')"]
    )
    assert {r.stdout for r in results} == {"x" * 99 + "\n" + "y" * 10**6}


def test_a_failing_host_ends_the_rest(cluster):
    mark = new_mark()
    with pytest.raises(HostFailedError, match="host 1 failed with exit code 7:\nworse") as caught:
        cluster.run(shell(f"test $RANK = 0 || {{ echo worse >&2; exit 7; }}; exec sleep {mark}"))
    assert (caught.value.host, caught.value.exit_code) == (1, 7)
    assert [r.exit_code for r in caught.value.results] == [-signal.SIGTERM, 7]
    assert not processes_with(mark)


def test_a_program_that_a_signal_ended_is_told_so(cluster):
    with pytest.raises(HostFailedError, match="host 0 was ended by SIGKILL"):
        cluster.run(shell("test $RANK = 1 || kill -9 $$; sleep 60"))


def test_a_timeout_ends_all_even_the_stubborn(cluster):
    mark = new_mark()
    script = f"trap '' TERM; sleep {mark} & echo ready; wait; wait"
    with pytest.raises(RunTimeoutError, match=r"not done after 2 s.*\n  host 0: ready") as caught:
        cluster.run(shell(script), timeout=2)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.late == [0, 1]
    wait_until(lambda: not processes_with(mark))  # the killed children of killed programs


def test_an_error_in_on_line_ends_all(cluster):
    mark = new_mark()

    def refuse(host, stream, line):
        raise KeyError(line)

    with pytest.raises(KeyError, match="hello"):
        cluster.run(shell(f"echo hello; exec sleep {mark}"), on_line=refuse)
    assert not processes_with(mark)


def test_a_program_outlives_the_thread_that_started_it_but_not_the_lab():
    mark, started = new_mark(), []
    with Lab(hosts=1) as lab:
        thread = threading.Thread(
            target=lambda: started.append(lab.hosts[0].start(["sleep", mark]))
        )
        thread.start()
        thread.join()
        wait_until(lambda: sleepers(mark))
        time.sleep(0.1)
        assert started[0].poll() is None
        orphan = new_mark()
        # Sleeping, it is in a session of its own: out of reach for who ends the program.
        lab.run(shell(f"setsid sleep {orphan} & until grep -q sleep /proc/$!/comm; do :; done"))
        assert sleepers(orphan)
    assert started[0].returncode == -signal.SIGTERM
    assert not processes_with(mark)
    assert not processes_with(orphan)


def test_a_lab_whose_holder_dies_says_so():
    with Lab(hosts=1) as lab:

        def strike(host, stream, line):
            os.kill(lab._holder.pid, signal.SIGKILL)

        with pytest.raises(LabError, match="holds the lab has ended"):
            lab.run(shell("echo ready; exec sleep 3600"), on_line=strike)
        with pytest.raises(LabError, match="holds the lab has ended"):
            lab.counters()


# Endings

OWNER = """
import json, subprocess, sys
from thinwire.lab import Lab
mark = sys.argv[1]
with Lab(hosts=2) as lab:
    spaces = [r.stdout.strip() for r in lab.run(["readlink", "/proc/self/ns/net"])]
    lab.hosts[0].start(["sh", "-c", f"setsid sleep {mark} & exec sleep {mark}"])
    print(json.dumps(spaces), flush=True)
    lab.run(["sleep", mark])
"""


def struck(process, namespaces_of, mark, blow):
    """Send a signal to a process whose lab has two hosts and four sleepers; what it then says.

    Nothing of the lab may be left.
    """
    try:
        namespaces = namespaces_of(process.stdout)
        assert len(set(namespaces)) == 2
        wait_until(lambda: sleepers(mark) == 4)
        assert users_of(namespaces)
        process.send_signal(blow)
        _, complaints = process.communicate()
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes_with(mark))
    wait_until(lambda: not users_of(namespaces))
    return complaints


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_however_the_owner_ends(blow):
    mark = new_mark()
    interfaces = socket.if_nameindex()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, mark], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # The sleepers: two of the run, one of start and the one that this one left to itself.
    complaints = struck(owner, lambda said: json.loads(said.readline()), mark, blow)
    assert (b"KeyboardInterrupt" in complaints) == (blow == signal.SIGINT)
    assert not processes_with(f"thinwire.lab.holder {owner.pid}")
    assert socket.if_nameindex() == interfaces


def test_an_exception_in_the_block_ends_all():
    mark, pids = new_mark(), []

    def stumble():
        with Lab(hosts=1) as lab:
            pids.extend([lab.hosts[0].start(["sleep", mark]).pid, lab._holder.pid])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not processes_with(mark)


# Others

VISITOR = """
import contextlib, json, sys
from thinwire.lab import Lab, LabError
with contextlib.ExitStack() as stack:
    try:
        lab = stack.enter_context(Lab(hosts=2, link="20mbit"))
    except LabError as error:
        print(json.dumps([str(error), None, None]))
        sys.exit()
    lab.run([sys.executable, "-I", "-S", "-c", sys.argv[1], "200000", "200000"])
    lab.set_link(0, "10mbit")
    users = [int(result.stdout) for result in lab.run(["id", "-u"])]
    sent = [c.sent_bytes for c in lab.counters()]
    print(json.dumps([None, users, sent]))
"""


def test_an_ordinary_user_can_have_a_lab():
    if os.geteuid() != 0:
        pytest.skip("the other tests show it already: this is an ordinary user")
    # The interpreter of the tests may lie where nobody may look.
    for python in (sys.executable, shutil.which("python3", path="/usr/bin") or sys.executable):
        try:
            done = subprocess.run(
                [python, "-c", VISITOR, EXCHANGE],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd="/",
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except PermissionError as error:
            done = subprocess.CompletedProcess([], 1, "", str(error))
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"no Python that user {NOBODY} can run: {done.stderr.strip()[-300:]}")
    reason, users, sent = json.loads(done.stdout)
    if reason:
        pytest.skip(f"an ordinary user can have no lab here: {reason}")
    assert users == [NOBODY, NOBODY]
    assert min(sent) > 200_000


ALL_REDUCE = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
x = torch.full((100_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert (x == 3.0).all(), x
dist.destroy_process_group()
"""


def test_gloo_reduces_across_hosts(lab):
    before = lab.counters()
    env = {"OMP_NUM_THREADS": "1"}
    lab.run([sys.executable, "-c", ALL_REDUCE], env=env)
    # With two ranks each sends all of its tensor once: 400,000 bytes, headers and the store's talk.
    for last, first in zip(lab.counters(), before, strict=True):
        assert 400_000 < (last - first).sent_bytes < 480_000
