"""`thinwire lab`: what it shows, what it returns, and that it leaves nothing."""

import dataclasses
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_cli import ENVIRONMENT
from test_lab import (
    NOBODY,
    new_mark,
    processes_with,
    sleepers,
    struck,
    wait_until,
)

from thinwire.cli import main
from thinwire.lab import Lab, clean, why_not
from thinwire.lab.cleaning import VARIABLE, Owner, owner_of, this_process

COMMAND = (sys.executable, "-m", "thinwire", "lab")


@pytest.fixture
def alone(possible):
    """No other run of these tests makes orphans or ends ours meanwhile."""
    path = Path(tempfile.gettempdir()) / f"thinwire-orphans-{os.geteuid()}.lock"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(*arguments, **options):
    env = {**ENVIRONMENT, "PYTHONUTF8": "1", "TERM": "xterm"}
    env.pop("NO_COLOR", None)
    return subprocess.Popen([*COMMAND, *arguments], env=env, **options)


# Arguments


# Arguments of `lab run` that cannot work, and a word of what must be said of them.
WRONG = {
    "nothing": ("", "no program to run"),
    "no program": ("--hosts 2 --", "after --, like -- python train.py"),
    "no separator": ("--hosts 2 sh -c true", "write -- between the options and the program"),
    "unknown program": ("--hosts 2 -- no-such-program", "no program 'no-such-program'"),
    "option": ("--host 2 -- true", "unrecognized"),
    "no number of hosts": ("-- true", "--hosts is needed"),
    "no host": ("--hosts 0 -- true", "--hosts must be at least 1"),
    "many hosts": ("--hosts 251 -- true", "hosts must be from 1 to 250, got 251"),
    "not a number": ("--hosts two -- true", "invalid int"),
    "rate": ("--hosts 2 --link 100mbps -- true", "a rate is a number and one of bit, kbit"),
    "one of the rates": ("--link 1mbit,,2mbit -- true", "got ''"),
    "slow": ("--hosts 2 --link 1bit -- true", "from 10kbit to 10gbit"),
    "number of rates": ("--hosts 3 --link 1mbit,2mbit -- true", "--link has 2 rates for 3 hosts"),
    "no file": ("--links /no/such/file -- true", "cannot read /no/such/file: No such file"),
    "both": ("--link 1mbit --links file -- true", "not allowed with"),
    "more racks": ("--hosts 2 --racks 3 --inter 1mbit -- true", "racks must be from 1 to 2"),
    "racks alone": ("--hosts 2 --racks 2 -- true", "2 racks need the rate between them, inter"),
    "inter alone": ("--hosts 2 --inter 1mbit -- true", "racks must be 2 or more"),
    "inter": ("--hosts 2 --racks 2 --inter slow -- true", "a rate is a number"),
    "timeout": ("--hosts 2 --timeout 0 -- true", "--timeout must be more than 0"),
    "delay": (
        "--hosts 2 --delay 15 -- true",
        "delay is a number and one of us, ms, s, like",
    ),
    "jitter": ("--hosts 2 --jitter much -- true", "jitter is a number and one of us, ms, s"),
    "loss": (
        "--hosts 2 --loss 1.5 -- true",
        "loss must be a share in [0, 1), like 0.001",
    ),
    "far and fast": ("--hosts 2 --link 5gbit --delay 1ms -- true", "at most 1000mbit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, capsys):
    line, word = WRONG[name]
    code = main(["lab", "run", *line.split()])
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    (told,) = error.splitlines()
    assert told.startswith("thinwire")
    assert ": error: " in told
    assert word in told


def test_a_file_with_a_wrong_line_is_named(tmp_path, capsys):
    file = tmp_path / "links"
    file.write_text("1gbit\nfast\n")
    assert main(["lab", "run", "--links", str(file), "--", "true"]) == 2
    assert f"error: {file}, line 2: a rate is" in capsys.readouterr().err


def test_an_empty_rate_is_told(capsys):
    assert main(["lab", "run", "--hosts", "2", "--link", "", "--", "true"]) == 2
    assert "a rate is a number" in capsys.readouterr().err


def test_where_no_lab_can_be_made_the_reason_is_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["lab", "run", "--hosts", "2", "--", "true"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "error: no lab can be made here: a lab needs Linux" in told
    assert main(["lab", "clean"]) == 2


# Runs


def test_lines_are_tagged_and_the_links_are_told(possible, capfd):
    script = "echo $RANK of $WORLD_SIZE in $THINWIRE_RACK; echo oh >&2"
    racks = ("--hosts", "3", "--link", "1gbit", "--racks", "2", "--inter", "20mbit")
    assert main(["lab", "run", *racks, "--", "sh", "-c", script]) == 0
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] 0 of 3 in 0", "[1] 1 of 3 in 0", "[2] 2 of 3 in 1"]
    lines = error.splitlines()
    assert sorted(lines[:3]) == ["[0] oh", "[1] oh", "[2] oh"]
    assert lines[3].split() == ["link", "MB", "sent", "MB", "received", "packets", "dropped"]
    assert [re.split(r"  +", line) for line in lines[4:9]] == [
        ["host 0, rack 0", "1gbit", "0.00", "0.00", "0"],
        ["host 1, rack 0", "1gbit", "0.00", "0.00", "0"],
        ["host 2, rack 1", "1gbit", "0.00", "0.00", "0"],
        ["uplink of rack 0", "20mbit", "0.00", "0.00", "0"],
        ["uplink of rack 1", "20mbit", "0.00", "0.00", "0"],
    ]
    assert re.fullmatch(r"\d+\.\d s", lines[9])
    assert len(lines) == 10


def test_distance_is_told_with_the_links(capfd):
    if reason := why_not(distance=True):
        pytest.skip(f"no lab with distance can be made here: {reason}")
    options = ("--delay", "5ms", "--jitter", "1ms", "--loss", "0.1%")
    links = ("--link", "100mbit,20mbit delay=9ms", "--racks", "2", "--inter", "20mbit delay=30ms")
    assert main(["lab", "run", *options, *links, "--", "true"]) == 0
    told = [re.split(r"  +", line) for line in capfd.readouterr().err.splitlines()]
    assert [row[:2] for row in told[1:5]] == [
        ["host 0, rack 0", "100mbit delay=5ms jitter=1ms loss=0.1%"],
        ["host 1, rack 1", "20mbit delay=9ms jitter=1ms loss=0.1%"],
        ["uplink of rack 0", "20mbit delay=30ms"],
        ["uplink of rack 1", "20mbit delay=30ms"],
    ]
    late = "packets came 0.00 ms later than asked on average, 0.00% of them more than 5 ms"
    assert told[5] == [late]


def test_options_of_the_program_are_its_own(possible, tmp_path, capfd):
    file = tmp_path / "links"
    file.write_text("10mbit\n20mbit  # the second\n")
    program = ("--", "echo", "--help", "--", "--hosts", "7")
    assert main(["lab", "run", "--links", str(file), "--quiet", "--no-tags", *program]) == 0
    assert capfd.readouterr() == ("--help -- --hosts 7\n" * 2, "")


@pytest.mark.parametrize(
    ("options", "script", "code", "word"),
    [
        ("", "test $RANK = 0 && exec sleep {}; exit 7", 7, "host 1 failed with exit code 7"),
        ("", "test $RANK = 0 && exec sleep {}; kill -9 $$", 137, "host 1 was ended by SIGKILL"),
        ("--timeout 0.5", "exec sleep {}", 124, "ended after 0.5 s, not done: host 0, host 1"),
    ],
)
def test_how_a_run_ends_is_its_exit_code(possible, capfd, options, script, code, word):
    mark = new_mark()
    line = ["lab", "run", "--hosts", "2", *options.split(), "--", "sh", "-c", script.format(mark)]
    assert main(line) == code
    out, error = capfd.readouterr()
    assert out == ""
    *table, told = error.splitlines()
    assert told == f"thinwire lab run: {word}"
    assert len(table) == 4  # of two hosts: how much was sent before it failed may be the reason
    assert not processes_with(mark)


def test_a_terminal_gets_colours_and_what_python_prints_at_once(possible):
    mark = new_mark()
    program = f"import subprocess; print('hé'); subprocess.run(['sleep', '{mark}'])"
    ours, theirs = pty.openpty()
    command = start(
        *("run", "--hosts", "1", "--", sys.executable, "-S", "-c", program),
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    try:
        os.close(theirs)
        # It is shown while the program still runs.
        assert os.read(ours, 100).decode() == "\x1b[36m[0]\x1b[0m hé\r\n"
        wait_until(lambda: sleepers(mark))
        command.send_signal(signal.SIGINT)
        _, error = command.communicate()
    finally:
        command.kill()
        command.wait()
        os.close(ours)
    assert command.returncode == 130
    assert b"\x1b" not in error


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_the_command_ends(possible, blow):
    mark = new_mark()
    script = f"readlink /proc/self/ns/net; setsid sleep {mark} & trap '' INT; sleep {mark}"
    command = start(
        *("run", "--hosts", "2", "--no-tags", "--", "sh", "-c", script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said = struck(
        command, lambda out: [out.readline().decode().strip() for _ in range(2)], mark, blow
    )
    if blow == signal.SIGINT:
        assert command.returncode == 130
        assert said.decode().splitlines()[-1] == "thinwire: interrupted"
        assert b"Traceback" not in said
    else:
        assert command.returncode == -signal.SIGKILL


# Orphans

# Asks not to be killed with its owner, says so and stays.
STUBBORN = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
print(os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
"""
OWNER = """
import sys
from thinwire.lab import Lab
with Lab(hosts=1) as lab:
    argv = [sys.executable, "-I", "-S", "-c", *sys.argv[1:]]
    lab.run(argv, on_line=lambda *_: print(lab._holder.pid, flush=True))
"""


def stubborn_lab(mark):
    """A process that has a lab with a stubborn program, and the holder's number."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN, mark], env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    return owner, int(owner.stdout.readline())


def as_nobody():
    """How many orphans an ordinary user has ended, or None where there is no Python for one."""
    code = "from thinwire.lab import clean; print(len(clean()))"
    try:
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            timeout=30,
        )
    except OSError:
        return None
    return int(done.stdout) if done.returncode == 0 else None


@pytest.mark.parametrize("stopped", [False, True], ids=["holder killed", "holder stopped"])
def test_orphans_are_ended_and_nothing_else(alone, capsys, stopped):
    mark = new_mark()
    owner, holder = stubborn_lab(mark)
    with Lab(hosts=1) as lab:
        bystander = lab.hosts[0].start(["sleep", "60"])
        # Names an owner that is gone, but is in no lab.
        forged = dataclasses.replace(this_process(), start=1, network=1)
        assert forged.is_gone()
        innocent = subprocess.Popen(["sleep", "60"], env={**os.environ, VARIABLE: str(forged)})
        try:
            assert main(["lab", "clean"]) == 0
            assert mark not in capsys.readouterr().out, "its owner lives"
            assert processes_with(mark)

            os.kill(holder, signal.SIGSTOP)  # so that it cannot do what it is there for
            owner.kill()
            if not stopped:
                os.kill(holder, signal.SIGKILL)
            owner.wait()
            assert processes_with(mark), "this should have made an orphan"
            if os.geteuid() == 0:
                assert as_nobody() in (0, None), "others' processes are not ours to end"
                assert processes_with(mark)

            assert main(["lab", "clean"]) == 0
            out = capsys.readouterr().out
            told = [line for line in out.splitlines() if f"process {owner.pid}:" in line]
            assert len(told) == 1 + stopped
            assert all(line.startswith("ended process ") for line in told)
            assert not processes_with(mark)
            wait_until(lambda: not processes_with(f"thinwire.lab.holder {owner.pid}"))
            assert bystander.poll() is None
            assert innocent.poll() is None
            assert clean() == []
            assert main(["lab", "clean"]) == 0
            assert capsys.readouterr().out == "nothing left\n"
        finally:
            innocent.kill()
            innocent.wait()
            owner.kill()
            owner.communicate()


def test_every_process_of_a_lab_names_its_owner(possible):
    ours = this_process()
    assert (ours.pid, ours.is_gone()) == (os.getpid(), False)
    with Lab(hosts=1) as lab:
        sleep = lab.hosts[0].start(["sleep", "60"], env={VARIABLE: "mine"})
        wait_until(lambda: owner_of(sleep.pid) == ours)
        assert owner_of(lab._holder.pid) == ours
    assert owner_of(os.getpid()) is None
    gone = subprocess.Popen(["true"])
    try:
        wait_until(lambda: Owner(gone.pid, 1, ours.processes, 1).is_gone())
    finally:
        gone.wait()
    assert Owner(gone.pid, 1, ours.processes, 1).is_gone()
    # Seen from another process namespace no number says anything, so nothing is certain.
    assert not Owner(gone.pid, 1, ours.processes + 1, 1).is_gone()
    assert Owner(os.getpid(), ours.start - 1, ours.processes, 1).is_gone()
