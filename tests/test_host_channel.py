"""Messages through memory of one host: threads and forked processes for ranks, which lag, die, fork and give up."""

import datetime
import errno
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import threading
import time
import types

import pytest

import tilesmith.distributed.host_channel as host_channel
from ranks import gloo, run_checks
from tilesmith.distributed.agreement import CannotShare
from tilesmith.distributed.host_channel import PERIOD, SLOTS, Process, opened, this_process

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system has no /dev/shm")
LIMIT = datetime.timedelta(seconds=60)  # what only a fault takes, on a busy machine too
forking = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the memory's file is; nothing is ever left there."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(host_channel, "_FOLDER", path)
    yield path
    assert not list(path.iterdir())


@pytest.fixture
def ranks():
    """run(size, work): work(rank, gather) in a thread for each rank; what each gave or raised."""

    def run(size, work):
        barrier, values, found = threading.Barrier(size, timeout=60), [None] * size, [None] * size

        def gather(rank, value):
            values[rank] = json.loads(json.dumps(value))
            barrier.wait()
            told = list(values)
            barrier.wait()
            return told

        def begin(rank):
            here.rank = rank
            try:
                found[rank] = work(rank, lambda value: gather(rank, value))
            except Exception as problem:
                found[rank] = problem

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found

    return run


here = threading.local()


@pytest.fixture
def channels(ranks):
    """Those of so many ranks, all of them used by the test's thread."""
    return lambda size: ranks(size, lambda rank, gather: opened(gather, rank, size))


def _await(late):
    for peer, one in late:
        assert one.wait(LIMIT), f"rank {peer} does not come"


def _begun(channel, message):
    _await(channel.before())
    return channel.begin(message)


def _taken(channel, exchange):
    _await(channel.awaited(exchange))
    return exchange.found


def _message(rank, number, alike=0.5):
    """What a rank says in an exchange; often the same as others."""
    draw = random.Random(number)
    if draw.random() >= alike:
        draw = random.Random(f"{number} {rank}")
    return draw.randbytes(draw.choice((0, 1, 40, 900, host_channel.ROOM)))


def _talk(rank, size, channel, numbers, lag):
    """Exchange by exchange, sometimes the answers later or never; rank and number of what is not right."""
    draw, wrong, begun = random.Random(f"{rank} {size}"), [], []
    for number in numbers:
        if lag:
            time.sleep(draw.choice((0, 0, 0, lag)))
        begun.append((number, _begun(channel, _message(rank, number))))
        if draw.random() < 0.7:
            for one, exchange in draw.sample(begun, len(begun)):
                expected = {r: _message(r, one) for r in range(size) if r != rank}
                wrong += [] if _taken(channel, exchange) == expected else [(rank, one)]
            begun.clear()
        elif draw.random() < 0.3:
            begun.clear()  # as after an exception: nobody will ask
    _await(channel.before())  # whoever goes on while others still want what it wrote would overwrite it
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_taken_is_what_was_written(ranks, size):
    """Also where ranks lag, and where answers are asked for late, in another order or never."""

    def work(rank, gather):
        channel = opened(gather, rank, size)
        wrong = _talk(rank, size, channel, range(400), 0.0005 if rank else 0.001)
        gather("all have ended")
        return wrong

    assert ranks(size, work) == [[]] * size


def _by_files(folder, rank, size):
    """A gather between processes."""
    turns = itertools.count()

    def gather(value):
        turn = next(turns)
        part = folder / f"part{rank}"
        part.write_text(json.dumps(value))
        part.rename(folder / f"{turn}-{rank}")
        found, until = [folder / f"{turn}-{r}" for r in range(size)], time.monotonic() + 60
        while not all(path.exists() for path in found):
            assert time.monotonic() < until
            time.sleep(0.001)
        return [json.loads(path.read_text()) for path in found]

    return gather


@pytest.mark.skipif(forking is None, reason="this system cannot fork")
@pytest.mark.parametrize("size", [2, 4])
def test_processes(tmp_path, size):
    """A thousand exchanges, on fewer processors than there are ranks."""
    told = forking.SimpleQueue()

    def work(rank):
        gather = _by_files(tmp_path, rank, size)
        told.put(_talk(rank, size, opened(gather, rank, size), range(1000), 0))
        gather("all have ended")
        os._exit(0)

    processes = [forking.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    assert [told.get() for _ in processes] == [[]] * size


def _torn(old, new):
    """Memory in which a record is half written, in some orders of its bytes."""
    draw = random.Random(0)
    old = old.ljust(len(new), b"\0")
    for order in (list(range(len(new))), list(reversed(range(len(new)))), draw.sample(range(len(new)), len(new))):
        content = bytearray(old)
        for place in order:
            content[place] = new[place]
            if content[: len(new)] != new:
                yield bytes(content)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("before", [b"as long as the next", b"longer than the one that comes after it", b"short", b""])
def test_a_message_that_is_half_written_is_not_taken(channels, before, alike):
    """Over the one that had its slot before, whichever bytes of it come first."""
    one, other = channels(2)
    for message in (before, *[b"between"] * (SLOTS - 1)):
        exchanges = [each.begin(message) for each in (one, other)]
        assert [each.awaited(exchange) for each, exchange in zip((one, other), exchanges)] == [[], []]
    mine = one.begin(b"AS LONG AS THE NEXT" if alike else b"another")
    at = host_channel._AREA + host_channel._FIRST + (SLOTS + 1) % SLOTS * host_channel._SLOT
    record = host_channel._record(SLOTS + 1, b"AS LONG AS THE NEXT")
    old = host_channel._record(1, before)
    for content in _torn(old, record):
        one._memory[at : at + len(content)] = content
        assert len(one.awaited(mine)) == 1 and not mine.found
    one._memory[at : at + len(record)] = record
    assert one.awaited(mine) == [] and mine.found == {1: b"AS LONG AS THE NEXT"}


def test_a_number_that_is_half_written_is_no_number(channels):
    """255 and 256 have no byte in common: of either, a half would be another number."""
    one, _ = channels(2)
    old, new = host_channel._record(255), host_channel._record(256)
    for place, known in ((host_channel._TAKEN, one._has_taken), (host_channel._LEFT, one._has_left)):
        at = host_channel._AREA + place
        for content in _torn(old, new):
            one._memory[at : at + len(content)] = content
            assert content == old or not known(1, 1 << 20 if place else 0)
        one._memory[at : at + len(new)] = new
    assert one._has_taken(1, 256) and not one._has_taken(1, 257)
    assert one._has_left(1, 256) and not one._has_left(1, 255)


def test_who_takes_each_exchange_never_waits_to_write(channels, monkeypatch):
    """In whatever order ranks come; with one slot less they would."""

    def waits(size, seed):
        draw, states = random.Random(seed), [None] * size
        each, waited = channels(size), 0
        for _ in range(200):
            rank = draw.randrange(size)
            if states[rank] is None:
                late = each[rank].before()
                waited += bool(late)
                states[rank] = None if late else each[rank].begin(b"message")
            elif not each[rank].awaited(states[rank]):
                states[rank] = None
        return waited

    assert all(waits(size, seed) == 0 for size in (2, 3, 4) for seed in range(8))
    monkeypatch.setattr(host_channel, "SLOTS", SLOTS - 1)
    assert any(waits(2, seed) for seed in range(8))


def test_what_a_slow_rank_has_not_taken_is_not_overwritten(channels):
    one, slow = channels(2)
    for number in range(SLOTS):
        _begun(one, b"%d" % number)
    theirs = [_begun(slow, b"theirs") for _ in range(SLOTS)]
    (late,) = one.before()
    assert late[0] == 1 and late[1].wait(datetime.timedelta(seconds=0.01)) is False
    assert _taken(slow, theirs[0]) == {0: b"0"}
    assert one.before() == []
    one.begin(b"next")
    assert _taken(slow, theirs[1]) == {0: b"1"}


def test_answers_that_nobody_asks_for_hold_nobody_up(ranks):
    """All ranks begin one exchange after the other; the last answers are right, and so are the first, if asked for."""

    def work(rank, gather):
        channel = opened(gather, rank, 3)
        begun = [_begun(channel, b"%d of %d" % (number, rank)) for number in range(5 * SLOTS)]
        last = _taken(channel, begun[-1])
        gather("all have taken it")
        return last, [exchange.found for exchange in begun]

    for rank, (last, all_) in enumerate(ranks(3, work)):
        expected = [{r: b"%d of %d" % (n, r) for r in range(3) if r != rank} for n in range(5 * SLOTS)]
        assert last == expected[-1] and all_ == expected


def _soon(late, match):
    """What is waited for raises at once."""
    (_, one), *_ = late
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=match):
        one.wait(LIMIT)
    assert time.monotonic() - began < LIMIT.total_seconds() / 4


def test_a_rank_that_gives_up_is_heard_of(channels):
    """What it wrote in the exchange that it gave up is not taken: it has raised, and will do nothing of the call."""
    one, other, third = channels(3)
    before = [each.begin(b"one") for each in (one, other, third)]
    mine = [one.begin(b"two"), other.begin(b"two")]
    assert [one.awaited(before[0]), other.awaited(before[1])] == [[], []]
    one.give_up()
    (late, _) = other.awaited(mine[1])
    assert late[0] == 0
    _soon([late], "given up")
    assert third.awaited(before[2]) == []  # that exchange one had finished


def test_a_group_that_ends_is_heard_of_after_its_last_message(channels):
    one, other = channels(2)
    last = one.begin(b"last")
    mine = _begun(other, b"last")
    one.close()
    one.close()
    assert _taken(other, mine) == {0: b"last"}
    _soon(other.awaited(_begun(other, b"more")), "its process group has ended")
    with pytest.raises(RuntimeError, match="its process group has ended"):
        one.before()
    with pytest.raises(RuntimeError, match="its process group has ended"):
        one.awaited(last)


def test_a_rank_that_will_never_take_what_it_began_is_heard_of(channels):
    one, other = channels(2)
    for channel in (one, other):
        for _ in range(SLOTS):
            channel.begin(b"nobody asks")
    one.close()
    late = other.before()
    assert [peer for peer, _ in late] == [0]
    _soon(late, "its process group has ended")


@pytest.mark.skipif(forking is None, reason="this system cannot fork")
def test_a_process_that_dies_is_noticed_at_once(tmp_path):
    """Also if nobody has asked for its exit code; what it wrote before is taken."""

    def work():
        channel = opened(_by_files(tmp_path, 1, 2), 1, 2)
        _taken(channel, _begun(channel, b"first"))
        _begun(channel, b"last words")
        os._exit(9)

    process = forking.Process(target=work)
    process.start()
    channel = opened(_by_files(tmp_path, 0, 2), 0, 2)
    assert channel._processes[1].pid == process.pid
    for message in (b"first", b"last words"):
        assert _taken(channel, _begun(channel, b"mine")) == {1: message}
    exchange = channel.begin(b"and now?")
    _soon(channel.awaited(exchange), "its process has ended")
    channel.begin(b"and now?")
    _soon(channel.before()[1:], "its process has ended")
    process.join(60)
    assert not channel._processes[1].alive


def test_a_process_is_known_by_when_it_began(monkeypatch):
    """Numbers of processes are given again; what the system does not tell is no death."""
    process = this_process()
    assert process.alive and process.pid == os.getpid()
    assert not process._replace(began=str(int(process.began) - 1)).alive
    assert not process._replace(pid=1 << 30).alive

    def refused(*given):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(host_channel.Path, "read_text", refused)
    assert process.alive


@pytest.mark.skipif(forking is None, reason="this system cannot fork")
def test_a_forked_process_leaves_the_channel_alone(channels):
    one, other = channels(2)
    mine = one.begin(b"mine")
    child = os.fork()
    if child == 0:
        said = []
        for use in (one.before, lambda: one.awaited(mine)):
            try:
                use()
            except RuntimeError as problem:
                said.append(str(problem))
        one.give_up()
        one.close()
        os._exit(0 if said == ["this process was forked from one of the group's"] * 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _taken(other, _begun(other, b"theirs")) == {0: b"mine"}
    assert _taken(one, mine) == {1: b"theirs"}


class _Clock:
    """Time that only looks and sleeps take."""

    def __init__(self):
        self.now, self.sleeps, self.yields = 0.0, [], 0

    def monotonic(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds

    def sched_yield(self):
        self.yields += 1


def test_who_waits_lets_others_run(monkeypatch):
    """At first without sleeping, for some tens of microseconds; then in growing steps, no longer than a millisecond."""
    clock, looks = _Clock(), []
    monkeypatch.setattr(host_channel, "time", clock)
    monkeypatch.setattr(host_channel, "os", types.SimpleNamespace(sched_yield=clock.sched_yield))
    one = host_channel.Awaited(lambda: looks.append(clock.now), lambda: "", lambda: True)
    assert one.wait(datetime.timedelta(seconds=10)) is False
    assert 10 <= clock.now < 10.001 and looks[-1] >= 10
    assert 10 <= clock.yields <= 100
    assert clock.sleeps[:-1] == sorted(clock.sleeps[:-1]) and clock.sleeps[0] < 1e-5
    assert max(clock.sleeps) <= 1e-3 and len(looks) < 12_000


def test_a_process_is_looked_for_now_and_then(monkeypatch):
    """Not while others are as late as they usually are; what it wrote as it died is still found."""
    clock, asked = _Clock(), []
    monkeypatch.setattr(host_channel, "time", clock)
    one = host_channel.Awaited(lambda: False, lambda: "", lambda: asked.append(clock.now) or True)
    assert one.wait(datetime.timedelta(seconds=1)) is False
    assert asked[0] >= PERIOD and 0.5 / PERIOD < len(asked) <= 1 / PERIOD
    dead = []
    one = host_channel.Awaited(lambda: bool(dead), lambda: "", lambda: dead.append("now"))
    assert one.wait(datetime.timedelta(seconds=1)) is True


# ranks that cannot share --------------------------------------------------------------------------------------------


def _on_rank(rank, before, instead):
    """`instead` of a function on one rank."""
    return lambda *given: (instead if here.rank == rank else before)(*given)


def _raises(problem):
    def raising(*given):
        raise problem

    return raising


def _another(*given):
    """A file of the right size that is not rank 0's."""
    memory = host_channel.mmap.mmap(-1, 3 * host_channel._AREA)
    memory[host_channel._KNOWN : host_channel._KNOWN + 5] = b"other"
    return memory


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "name, instead, match",
    [
        ("_joined", _another, "ranks of one host map different memory"),
        ("_joined", _raises(PermissionError("no")), "rank {rank} cannot map the file: PermissionError: no"),
        ("_made", _raises(OSError("no room")), "rank {rank} cannot make a file in /dev/shm: OSError: no room"),
        ("this_process", lambda: Process("another host", 1, "2"), "several hosts, or in several containers"),
        ("this_process", _raises(OSError("no /proc")), "rank {rank} cannot make a file in /dev/shm: OSError: no /proc"),
        ("_confirmed", _raises(RuntimeError("no")), "rank {rank} cannot see what others write, and their processes: "),
    ],
)
def test_all_ranks_keep_gloo_where_one_cannot_share(ranks, monkeypatch, name, instead, match, rank):
    monkeypatch.setattr(host_channel, name, _on_rank(rank, getattr(host_channel, name), instead))
    found = ranks(3, lambda rank, gather: opened(gather, rank, 3))
    assert [type(problem) for problem in found] == [CannotShare] * 3
    assert match.format(rank=rank) in str(found[0])
    assert len(set(map(str, found))) == 1


def test_a_copy_of_the_memory_is_not_the_memory(ranks, monkeypatch):
    """It has the right token, but others do not see what is written there."""
    joined = host_channel._joined

    def copied(made, path, *given):
        memory = host_channel.mmap.mmap(-1, 3 * host_channel._AREA)
        memory[:] = path.read_bytes()
        return joined(memory, path, *given)

    monkeypatch.setattr(host_channel, "_joined", _on_rank(1, joined, copied))
    for problem in ranks(3, lambda rank, gather: opened(gather, rank, 3)):
        assert isinstance(problem, CannotShare) and "what rank 1 wrote is not there" in str(problem)


def test_a_process_that_is_not_seen_is_not_trusted(ranks, monkeypatch):
    """Its number means another process here, or none."""
    process = this_process()
    other = process._replace(began="1")
    monkeypatch.setattr(host_channel, "this_process", _on_rank(1, this_process, lambda: other))
    for problem in ranks(2, lambda rank, gather: opened(gather, rank, 2)):
        assert isinstance(problem, CannotShare)
        assert f"rank 1's process {process.pid} is not to be seen" in str(problem)


@pytest.mark.parametrize("lacking", ["folder", "sched_yield", "room"])
def test_systems_without_such_memory(ranks, monkeypatch, tmp_path, lacking):
    if lacking == "folder":
        monkeypatch.setattr(host_channel, "_FOLDER", tmp_path / "none")
    elif lacking == "sched_yield":
        monkeypatch.delattr(os, "sched_yield")
    else:
        monkeypatch.setattr(os, "posix_fallocate", _raises(OSError(errno.ENOSPC, "No space left on device")))
    said = "No space left on device" if lacking == "room" else "this system has none"
    for problem in ranks(2, lambda rank, gather: opened(gather, rank, 2)):
        assert isinstance(problem, CannotShare) and said in str(problem)


@pytest.mark.parametrize("wrong", ["size", "link", "owner"])
def test_a_file_that_somebody_else_has_put_there_is_not_opened(ranks, monkeypatch, tmp_path, wrong):
    def swapped(made, path, *given):
        if made is None and wrong != "owner":
            path.unlink()
            elsewhere = tmp_path / "elsewhere"
            elsewhere.write_bytes(bytes(2 * host_channel._AREA + (wrong == "size")))
            elsewhere.rename(path) if wrong == "size" else path.symlink_to(elsewhere)
        return joined(made, path, *given)

    joined = host_channel._joined
    monkeypatch.setattr(host_channel, "_joined", swapped)
    if wrong == "owner":
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    for problem in ranks(2, lambda rank, gather: opened(gather, rank, 2)):
        assert isinstance(problem, CannotShare) and "rank 1 cannot map the file" in str(problem)


def _mapped(folder):
    """Whether this process has a file of a folder in its memory, or open."""
    files = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return str(folder) in pathlib.Path("/proc/self/maps").read_text() + "".join(files)


def test_the_file_is_its_owners_and_has_no_name_once_all_have_it(ranks, monkeypatch, folder):
    joined, modes = host_channel._joined, []

    def looked(made, path, *given):
        modes.append(path.stat().st_mode & 0o777)
        return joined(made, path, *given)

    monkeypatch.setattr(host_channel, "_joined", looked)
    found = ranks(2, lambda rank, gather: opened(gather, rank, 2))
    assert modes == [0o600] * 2 and not list(folder.iterdir())
    assert _mapped(folder)
    for channel in found:
        channel.close()
    assert not _mapped(folder)


def test_a_rank_that_is_lost_meanwhile_leaves_no_file(ranks):
    def work(rank, gather):
        calls = itertools.count()

        def lost(value):
            if next(calls) == 1:
                raise InterruptedError
            return gather(value)

        return opened(lost, rank, 2)

    assert [type(problem) for problem in ranks(2, work)] == [InterruptedError] * 2


@gloo
@pytest.mark.parametrize("size", [2, 3])
def test_ranks(tmp_path, size):
    told = run_checks(tmp_path, ("sharded_host_channel",), size)
    assert not any("FAILED" in one for one in told), "\n".join(told)
