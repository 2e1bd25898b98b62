"""What all tests share: two threads, repeatable Hypothesis examples, no network."""

import gc
import os
import signal
import socket

import hypothesis
import pytest
import server

# What is imported stays: to look for garbage in it again and again takes a second of each process.
gc.disable()

# Threads of torch that wait for each other in a loop take the processor from the one they wait for
# when the machine has other work: tests with two of them took three times as long. Read when torch
# is loaded, so set before.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SERVER = pytest.StashKey[str]()  # where the server of ranks is, if the whole suite runs
NICENESS = 5  # with which three processes together get as much as the server
LONG = 600  # seconds for a test of several processes
LONGEST = ("test_compare", "test_all_reduce")  # minutes in all

hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=8,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# Fresh examples, many more, without time limits: make test-thorough
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("default"), derandomize=False,
    max_examples=1000,
)  # fmt: skip
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def two_threads():
    """Every test starts with two threads, whatever the machine has or the last test left."""
    import torch  # not by the process that only hands out the tests to others

    torch.set_num_threads(2)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Tests reach this machine only."""
    connect = socket.socket.connect

    def local(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("localhost", "127.0.0.1", "::1"):
            pytest.fail(f"a test tried to reach {address}: tests use no network")
        return connect(self, address)

    socket.socket.connect = local
    yield
    socket.socket.connect = connect


@pytest.fixture(scope="session")
def possible():
    """Skips where no lab can be made."""
    from thinwire.lab import why_not

    reason = why_not()
    if reason:
        pytest.skip(f"no lab can be made here: {reason}")


def pytest_collection_modifyitems(config, items):
    """Tests without kernels first, those with many processes last, of these the longest first.

    The kernels are compiled meanwhile, so that no process has to do it for itself.
    """
    several = {"Ranks", "ranks", "run", "torchrun"}
    without_kernels = {
        *("test_cli_lab", "test_docs", "test_imports", "test_lab", "test_lab_distance"),
        *("test_lab_racks", "test_loopback", "test_report", "test_spec", "test_workloads"),
    }

    def place(item):
        name = item.module.__name__
        if name in without_kernels:
            return 0
        if not (several & vars(item.module).keys() or name in LONGEST):
            return 1
        return 2 if name in LONGEST else 3

    items.sort(key=place)
    for item in items:  # which may be the first to start processes, on a busy machine
        if place(item) >= 2 and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG))
    if config.getoption("--hypothesis-profile") == "thorough":
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)


def pytest_configure(config):
    """A process that shares the tests has the server of ranks in common with the others.

    The server comes first: what it has not compiled when tests want it, each compiles for itself.
    A shell starts what is to run behind it deaf to Ctrl-C, which programs inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if address := getattr(config, "workerinput", {}).get("ranks"):
        os.nice(NICENESS)
        server.join(address)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """The whole suite needs ranks and all kernels: the server of ranks compiles them meanwhile."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if whole and not config.option.collectonly and not hasattr(config, "workerinput"):
        config.stash[SERVER] = server.address()


def pytest_collection_finish():
    """All is imported: from now on garbage is what tests leave."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Before pytest-xdist starts a process."""
    node.workerinput["ranks"] = node.config.stash.get(SERVER, "")
