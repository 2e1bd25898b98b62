"""Loopback: ranks without a lab, which end with whoever started them.

What it has in common with a lab is tested in test_lab.py, for both.
"""

import os
import signal
import subprocess
import sys

import pytest
from test_lab import new_mark, processes_with, shell, sleepers, wait_until

from thinwire.lab import HostFailedError, Loopback


def test_loopback_ranks_know_their_place():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MINE")
    with Loopback(hosts=2) as loopback:
        results = loopback.run(
            shell(f"echo {' '.join(f'${name}' for name in names)} $MASTER_PORT"), env={"MINE": "x"}
        )
        words = [result.stdout.split() for result in results]
        assert [row[:-1] for row in words] == [
            [rank, rank, "2", "2", "127.0.0.1", "x"] for rank in ("0", "1")
        ]
        assert words[0][-1] == words[1][-1]
        assert [host.address for host in loopback.hosts] == ["127.0.0.1"] * 2


@pytest.mark.parametrize(("hosts", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_numbers_of_loopback_hosts_are_refused(hosts, error):
    with pytest.raises(error, match="hosts must be"):
        Loopback(hosts)


def test_where_the_system_does_not_tell_of_ends_they_are_looked_for(monkeypatch):
    for name in ("pidfd_open", "waitid"):  # macOS has neither
        monkeypatch.delattr(os, name)
    mark = new_mark()
    with Loopback(hosts=2) as loopback:
        assert [r.stdout for r in loopback.run(shell("echo $RANK"))] == ["0\n", "1\n"]
        with pytest.raises(HostFailedError, match="host 1 failed with exit code 7"):
            loopback.run(shell(f"test $RANK = 0 || exit 7; exec sleep {mark}"))
        assert not processes_with(mark)


LOOPBACK_OWNER = """
import sys
from thinwire.lab import Loopback
with Loopback(hosts=2) as loopback:
    loopback.run(["sleep", sys.argv[1]])
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_loopback_programs_end_with_their_owner(blow):
    mark = new_mark()
    owner = subprocess.Popen(
        [sys.executable, "-c", LOOPBACK_OWNER, mark], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: sleepers(mark) == 2)
        owner.send_signal(blow)
        owner.wait()
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not processes_with(mark))
