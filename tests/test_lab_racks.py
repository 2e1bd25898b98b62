"""Racks: what is between them is slow, and what stays inside one never touches that."""

import itertools
import subprocess

import pytest
from test_lab import EXCHANGE, PYTHON, check_rate, shell

from thinwire.lab import Lab, read_links
from thinwire.lab.topology import lay_out

ports = itertools.count(31000)


@pytest.fixture(scope="module")
def lab(possible):
    with Lab(hosts=4, link="1gbit", racks=2, inter="50mbit") as lab:
        yield lab


def talk(lab, first, second, size, back):
    """Let two hosts exchange bytes over TCP; what every host and every uplink carried for it."""
    before = lab.counters(), lab.inter_counters()
    place = {"MASTER_ADDR": lab.hosts[first].address, "MASTER_PORT": str(next(ports))}
    programs = [
        lab.hosts[host].start(
            [*PYTHON, EXCHANGE, str(size), str(back)],
            env={"RANK": str(rank), **place},
            stdout=subprocess.DEVNULL,
        )
        for rank, host in enumerate((first, second))
    ]
    assert [program.wait() for program in programs] == [0, 0]
    after = lab.counters(), lab.inter_counters()
    return tuple(
        [last - early for last, early in zip(*pair, strict=True)]
        for pair in zip(after, before, strict=True)
    )


# What is asked for


@pytest.mark.parametrize(
    ("hosts", "racks", "places"),
    [
        (3, 1, [0, 0, 0]),
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (7, 3, [0, 0, 0, 1, 1, 2, 2]),
        (3, 3, [0, 1, 2]),
    ],
)
def test_hosts_are_divided_in_order_and_evenly(hosts, racks, places):
    topology = lay_out(hosts, "1gbit", racks, "20mbit" if racks > 1 else None)
    assert [station.rack for station in topology.stations] == places


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"racks": 5, "inter": "1mbit"}, ValueError, "racks must be from 1 to 4, .* got 5"),
        ({"racks": 0}, ValueError, "racks must be from 1 to 4, .* got 0"),
        ({"racks": 2.0}, TypeError, "racks must be a number of racks"),
        ({"racks": 2}, ValueError, "2 racks need the rate between them, inter"),
        ({"inter": "1mbit"}, ValueError, "racks must be 2 or more"),
        ({"racks": 2, "inter": "fast"}, ValueError, "a rate is a number"),
        ({"racks": 2, "inter": 100}, TypeError, "a rate is text"),
    ],
)
def test_wrong_racks_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Lab(hosts=4, **arguments)


def test_links_are_read_from_a_file(tmp_path):
    file = tmp_path / "links.txt"
    file.write_text("# two racks\n1gbit\n\n  100 mbit  # the slow one\n1.5Gbit/s\n")
    assert read_links(file) == ["1gbit", "100 mbit", "1.5Gbit/s"]
    assert read_links(str(file)) == read_links(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1gbit\n# fine\nfast\n", r"links\.txt, line 3: a rate is a number .* got 'fast'"),
        ("1gbit 2gbit\n", r"links\.txt, line 1: .* got '1gbit 2gbit'"),
        ("1kbit", r"links\.txt, line 1: a rate must be from 10kbit"),
        ("\xff\n", r"links\.txt, line 1: "),
        ("# nothing\n\n", r"links\.txt: expected one rate per line, like '100mbit', found none"),
    ],
)
def test_a_file_without_rates_is_refused(tmp_path, text, words):
    file = tmp_path / "links.txt"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=words):
        read_links(file)


# What is built


def test_hosts_and_programs_know_their_rack(lab):
    assert [host.rack for host in lab.hosts] == [0, 0, 1, 1]
    assert [r.stdout for r in lab.run(shell("echo $THINWIRE_RACK"))] == ["0\n", "0\n", "1\n", "1\n"]


def test_what_stays_in_a_rack_never_touches_the_uplinks(possible):
    # A new lab: nobody knows anybody yet, so all that a search could flood would be flooded.
    with Lab(hosts=4, link="1gbit", racks=2, inter="50mbit") as lab:
        for first, second in ((0, 1), (3, 2)):
            hosts, uplinks = talk(lab, first, second, 200_000, 100_000)
            assert hosts[second].received_bytes > 200_000
            assert hosts[second].sent_bytes > 100_000
            for uplink in uplinks:
                assert (uplink.sent_packets, uplink.received_packets) == (0, 0)


def test_what_goes_between_racks_is_counted_at_the_uplinks(lab):
    size, back = 600_000, 300_000
    hosts, (here, there) = talk(lab, 1, 2, size, back)
    # Two racks have one link, so both ends see the same.
    assert (here.sent_bytes, here.received_bytes) == (there.received_bytes, there.sent_bytes)
    # Bounds as in test_lab: packets of 1514 bytes with 1448 of payload, and an acknowledgement of
    # 66 bytes for each packet of the other direction at most. What is dropped is sent again, and
    # a twentieth may be sent twice because a busy machine answers late.
    acknowledgements = 1.01 * 66 / 1448
    lost = 1514 * here.dropped_packets
    assert size * 1514 / 1448 <= here.sent_bytes
    assert here.sent_bytes <= 1.05 * size * 1514 / 1448 + back * acknowledgements + lost
    assert back * 1514 / 1448 <= here.received_bytes
    assert here.received_bytes <= 1.05 * back * 1514 / 1448 + size * acknowledgements + lost
    # A host's own link carries that and no more than a few questions, 42 bytes, in its rack.
    assert 0 <= hosts[2].received_bytes - there.received_bytes <= 10 * 42
    assert 0 <= hosts[1].received_bytes - here.received_bytes <= 10 * 42
    assert hosts[0].received_bytes <= 10 * 42
    assert hosts[3].received_bytes <= 10 * 42


def test_a_rack_that_is_not_spoken_to_carries_nothing(possible):
    with Lab(hosts=3, link="1gbit", racks=3, inter="50mbit") as lab:
        assert len(lab.inter_counters()) == 3
        hosts, uplinks = talk(lab, 0, 2, 100_000, 100_000)
    assert uplinks[0].sent_bytes == uplinks[2].received_bytes > 100_000
    assert uplinks[2].sent_bytes == uplinks[0].received_bytes > 100_000
    assert (uplinks[1].sent_packets, uplinks[1].received_packets) == (0, 0)
    assert (hosts[1].sent_packets, hosts[1].received_packets) == (0, 0)


def test_racks_have_their_rate_both_ways_and_change_it(possible):
    with Lab(hosts=2, link="1gbit", racks=2, inter="20mbit", queue_seconds=0.02) as lab:
        check_rate(lab, 20e6, 1_500_000)
        lab.set_inter("50mbit")
        check_rate(lab, 50e6, 3_000_000)
        with pytest.raises(ValueError, match="a rate is a number"):
            lab.set_inter("fast")
