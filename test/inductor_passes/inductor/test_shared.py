"""One compile for ranks with one key: through a common folder or the store, and by each where
neither has it whole.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from inductor_passes.errors import RanksDifferError
from inductor_passes.inductor import shared_compile
from inductor_passes.inductor.shared_compile import SharedLowering
from inductor_passes.pass_options import COMPILES, PassOptions, split
from inductor_passes.ranks import compile_once, decision
from inductor_passes.ranks.collective_trace import CollectiveTrace, Group, Launch
from inductor_passes.ranks.coordination import SECONDS, Coordination
from inductor_passes.ranks.protocol import CachedOffer
from inductor_passes.testing import trace
from inductor_passes.torch_compat import c10d, caches

KEY = "fabcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_once, "LOOK_S", 0.01)
    shared_compile._say_once.cache_clear()
    shared_compile._marked.cache_clear()
    return tmp_path


def both(compiles, store=None, key=KEY):
    """What rank 1 gets that comes while rank 0, which runs ``compiles``, has a key: may it be
    there, and of whom.
    """
    store = store or dist.HashStore()
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    assert not first.missed(key)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second.missed, key)
        time.sleep(0.2)
        compiles()
        first.end()
        found = waits.result(10)
    second.end()
    return found, second.made_by


def save():
    assert caches.put_entry(KEY, b"code")


def test_what_one_has_compiled_the_other_finds_in_their_folder(folder):
    assert both(save) == (True, 0)
    assert len(list((folder / "inductor_passes" / "compiling").iterdir())) == 1  # of this process


def test_who_comes_when_it_is_done_finds_it_too():
    store = dist.HashStore()
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    assert not first.missed(KEY)
    save()
    first.end()
    assert second.missed(KEY)
    assert second.made_by == 0


def test_ranks_of_other_symbolic_sizes_do_not_wait():
    store = dist.HashStore()
    graphs = (trace(lambda x: x * 2, [rows, 3], dynamic=True) for rows in (4, 6))
    given = [graph.find_nodes(op="placeholder")[0].meta["val"] for graph in graphs]
    few, many = (shared_compile._hints([x, x.shape[0], 3]) for x in given)
    assert few != many and " 4 " in few
    ranks = [
        SharedLowering(Coordination(store), rank, sizes) for rank, sizes in enumerate((few, many))
    ]
    assert not any(each.missed(KEY) for each in ranks)
    for each in ranks:
        each.end()


def test_folders_apart_are_known_for_later_graphs(monkeypatch):
    monkeypatch.setattr(shared_compile, "is_here", lambda mark: False)
    store = dist.HashStore()
    both(save, store)
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    assert not first.missed("fother")
    caches.put_entry("fother", b"more")
    first.end()  # before the other comes
    monkeypatch.setattr(caches, "newest_entry", lambda key: None)  # not in the other's folder
    assert second.missed("fother")


def test_a_compile_that_fails_leaves_the_others_to_themselves():
    assert both(lambda: None) == (False, None)


def test_a_rank_of_another_row_votes_for_its_own_group(monkeypatch):
    """What rank 0 calls "3" is another group of rank 1's, or none: in the graphs of both it has
    one name.
    """
    voted = []
    rank_0, rank_1 = {"3": "second"}, {"second": "7"}
    monkeypatch.setattr(c10d, "_common", rank_0)
    monkeypatch.setattr(c10d, "own_name", lambda name: rank_1.get(name, name))
    monkeypatch.setattr(c10d, "real_group_ranks", {"7": (2, 3), "3": (1, 3)}.get)
    job = SimpleNamespace(decide=lambda stream, offer: voted.append(stream.groups))
    monkeypatch.setattr(shared_compile.decision, "current", lambda: job)
    store = dist.HashStore()
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    assert not first.missed(KEY)
    launch = Launch("all_reduce sum float32", 0, ("f:3",), 8)
    first.offers(CollectiveTrace((Group("3", (0, 1)),), (launch,)), offer=None)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second.missed, KEY)
        while not voted:
            time.sleep(0.01)
        first.end()
        waits.result(10)
    assert voted == [(Group("7", (2, 3)),)]


def test_rank_with_another_decision_compiles_for_itself(
    monkeypatch,
):
    """Rank 0's row keeps the program's order and asks for no plan; rank 1's row has settled on
    one before.
    """
    monkeypatch.setattr(compile_once, "VERDICT_S", 0.05)
    monkeypatch.setattr(c10d, "real_group_ranks", {"3": (1, 3)}.get)
    store, plan = dist.HashStore(), "[[[1], 0], [[0], 0]]"
    launches = tuple(Launch("all_reduce sum float32", 0, (f"f:{line}",), 8) for line in (3, 4))
    stream = CollectiveTrace((Group("3", (1, 3)),), launches)
    ranks = {rank: decision.Orders(store, rank, None) for rank in (1, 3)}
    with ThreadPoolExecutor(2) as pool:
        settled = pool.map(lambda job: job.decide(stream, CachedOffer(plan)).plan, ranks.values())
    assert set(settled) == {plan}
    monkeypatch.setattr(decision, "current", lambda: ranks[1])
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    assert not first.missed(KEY)
    first.offers(stream, CachedOffer("program"))
    assert not second.missed(KEY)  # an answer that is not there is no refusal
    assert ranks[1].decide(stream, CachedOffer(plan)).plan == plan
    first.end()


@pytest.fixture
def apart(monkeypatch):
    """The rank that compiles, in the main thread, has the entries that are written; the other
    has none of them.
    """
    monkeypatch.setattr(shared_compile, "is_here", lambda mark: False)
    newest = caches.newest_entry

    def in_own_folder(key):
        return newest(key) if threading.current_thread() is threading.main_thread() else None

    monkeypatch.setattr(caches, "newest_entry", in_own_folder)


@pytest.mark.usefixtures("apart")
def test_another_folder_gets_the_entry_through_the_store(monkeypatch):
    written = []
    put = caches.put_entry
    monkeypatch.setattr(caches, "put_entry", lambda *entry: written.append(entry) or put(*entry))
    assert both(lambda: put(KEY, b"code")) == (True, 0)
    assert written == [(KEY, b"code")]


@pytest.mark.usefixtures("apart")
def test_an_entry_that_is_not_what_was_announced_is_not_read(monkeypatch):
    monkeypatch.setattr(compile_once.Waiting, "entry", lambda self: b"cod")  # truncated
    assert both(save) == (False, None)


def test_a_folder_that_cannot_be_written_costs_the_sharing_alone(monkeypatch, caplog):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_compile.files, "put", refuse)
    assert both(lambda: None) == (False, None)
    assert "No space left" in caplog.text


def test_a_key_is_asked_for_once_a_compile():
    store = dist.HashStore()
    one = SharedLowering(Coordination(store), 0)
    assert not one.missed(KEY)
    assert not one.missed(KEY)
    one.end()
    again = SharedLowering(
        Coordination(store), 0
    )  # compiled here before, and gone from the cache since
    assert not again.missed(KEY)
    again.end()


def test_a_store_that_fails_leaves_each_to_itself(caplog):
    class Gone:
        def compare_set(self, *args):
            raise RuntimeError("connection reset")

    one = SharedLowering(Coordination(Gone()), 0)
    assert not one.missed(KEY)
    one.end()
    assert "connection reset" in caplog.text


def test_ranks_that_do_not_match_are_no_failure_of_the_store(monkeypatch):
    def outcome(self):
        raise RanksDifferError("they differ", "", "")

    monkeypatch.setattr(compile_once.Waiting, "outcome", outcome)
    store = dist.HashStore()
    first, second = SharedLowering(Coordination(store), 0), SharedLowering(Coordination(store), 1)
    first.missed(KEY)
    with pytest.raises(RanksDifferError):
        second.missed(KEY)
    first.end()


def test_nothing_is_shared_without_a_job_or_unless_asked_for():
    for who in COMPILES:
        options = PassOptions(compile=who)
        session = SimpleNamespace(options=options, cache_salt="", shared_trace=None)
        with shared_compile.share_lowering(session, ()) as found:
            assert found is None


def test_ranks_share_with_those_of_their_folder_unless_told_otherwise(tmp_path, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(c10d, "job_store", lambda: store)
    monkeypatch.setattr(c10d, "world_size", lambda: 2)

    def proposed(folder, rank, **options):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        session = SimpleNamespace(options=PassOptions(**options), cache_salt="")
        job = shared_compile.job_to_share(session)
        return None if job is None else job.propose("key", str(rank))

    assert [proposed("a", 0), proposed("a", 1), proposed("b", 2), proposed("b", 3)] == [*"0022"]
    assert [proposed(each, each, compile="shared") for each in "ab"] == ["a", "a"]
    assert proposed("a", 0, compile="each") is None
    monkeypatch.setenv(SECONDS, "0")
    assert proposed("a", 0) is None
    monkeypatch.delenv(SECONDS)
    # The folder cannot be made: each rank compiles for itself.
    Path(tmp_path, "file").touch()
    assert proposed("file", 0) is None


def test_the_option_is_checked_and_in_no_key():
    own, _ = split({"compile": "shared"})
    assert own.compile == "shared"
    assert own.digest() == PassOptions().digest()
    with pytest.raises(ValueError, match="'folder', 'each', 'shared'"):
        split({"compile": "once"})


def test_no_thread_is_left():
    beats = [each for each in threading.enumerate() if each.name == "dynamo_dist beat"]
    for each in beats:
        each.join(5)  # it has been told to end a moment ago
    assert not any(each.is_alive() for each in beats)
