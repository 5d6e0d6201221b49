"""Error memory as a transaction: whatever fails, in whatever order, no update mass is lost or counted twice."""

import os
import signal
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsparse.compression import Compressor, FencedError, MemoryStore, MemoryStoreError, decode, encode
from fedsparse.compression.memory_file import Pending, Stored, parts_of, read_file
from fedsparse.compression.memory_vectors import pack, unpack

D = 24


class Crash(Exception):
    """The client dies here."""


class Server:
    """The server's half of the contract: accept each id once, only as the answer to the latest question."""

    def __init__(self, spec: str) -> None:
        self.compressor = Compressor.from_spec(spec)
        self.accepted_mass = np.zeros(D)
        self.accepted: int | None = None
        self.asked = 0

    def ask(self) -> tuple[int, int | None]:
        self.asked += 1
        return self.asked, self.accepted

    def receive(self, frame: bytes, update_id: int) -> None:
        if update_id != self.asked or update_id == self.accepted:
            return
        decode(frame, self.compressor, D, update_id=update_id).add_to(self.accepted_mass)
        self.accepted = update_id


class Client:
    def __init__(self, store: MemoryStore, spec: str, momentum: float) -> None:
        self.store, self.compressor, self.momentum = store, Compressor.from_spec(spec), momentum
        self.trained = np.zeros(D)  # sum of the velocities u = m u + Delta that reached the store
        self.velocity = np.zeros(D)  # u as it must lie in the store

    def handle(self, update_id: int, ack: int | None, update: np.ndarray, crash: str) -> bytes:
        if crash == "before":
            raise Crash
        turn = self.store.begin("0", D, update_id, ack)
        if turn.resend is not None:
            assert turn.resend.update_id == update_id
            return turn.resend.frame
        if crash == "training":
            raise Crash
        sent = turn.compress(self.compressor, update, update_id, momentum=self.momentum)
        frame = encode(sent, self.compressor, update_id)
        if crash == "compressed":
            raise Crash
        turn.commit(frame)
        velocity = self.momentum * self.velocity + update
        self.trained += velocity
        velocity[slice(None) if sent.indices is None else sent.indices] = 0.0
        self.velocity = velocity
        if crash == "stored":
            raise Crash
        return frame


step = st.tuples(
    st.sampled_from(["", "", "", "before", "training", "compressed", "stored"]),  # where the client dies
    st.sampled_from(["deliver", "deliver", "drop", "delay", "twice"]),  # what the network does to the reply
    st.booleans(),  # whether the server asks the same question again (a retried task)
    st.integers(0, 2**31),
)


@pytest.mark.parametrize(
    "spec", ["topk(k=3)", "hard_threshold(lam=0.5)|qsgd(levels=4)", "randk(k=5)|sign", "none|sign"]
)
@settings(max_examples=150)
@given(schedule=st.lists(step, min_size=1, max_size=25), momentum=st.sampled_from([0.0, 0.9]))
def test_mass_is_conserved_under_every_schedule(tmp_path_factory, spec, schedule, momentum):
    store = MemoryStore(tmp_path_factory.mktemp("memory"), "run")
    server, client, late = Server(spec), Client(store, spec, momentum), []
    for crash, network, again, seed in schedule:
        update = np.random.default_rng(seed).standard_normal(D).astype(np.float32)
        update_id, ack = server.ask()
        for attempt in range(1 + again):
            try:
                frame = client.handle(update_id, ack, update, crash if attempt == 0 else "")
            except Crash:
                continue
            if network == "delay":
                late.append((frame, update_id))
            elif network != "drop":
                for _ in range(2 if network == "twice" else 1):
                    server.receive(frame, update_id)
        for frame, old_id in late:  # what was held back arrives now, out of order
            server.receive(frame, old_id)
        late = [item for item in late if item[1] == update_id][:1]

        residual, pending = store.read("0", D)
        waiting = np.zeros(D)
        if pending is not None and pending.update_id != server.accepted:
            decode(pending.frame, client.compressor, D).add_to(waiting)
        np.testing.assert_allclose(server.accepted_mass + residual + waiting, client.trained, atol=1e-4)
        if momentum:
            velocity = store.begin("0", D, 0).velocity  # a turn that ends here changes nothing but who may commit
            np.testing.assert_allclose(np.zeros(D) if velocity is None else velocity, client.velocity, atol=1e-4)


def committed(store: MemoryStore, client: str = "c", value: float = 2.0, update_id: int = 1) -> bytes:
    compressor = Compressor.from_spec("topk(k=1)")
    turn = store.begin(client, D, update_id)
    frame = encode(
        compressor.compress_with_memory(np.full(D, value, np.float32), turn.residual, 0), compressor, update_id
    )
    turn.commit(frame, b"metrics")
    return frame


def test_the_same_question_gets_the_same_answer(tmp_path):
    store = MemoryStore(tmp_path, "run")
    frame = committed(store)
    turn = store.begin("c", D, 1)
    assert turn.resend is not None
    assert (turn.resend.frame, turn.resend.attachment) == (frame, b"metrics")


def test_momentum_gathers_where_nothing_is_sent_and_goes_when_it_is_switched_off(tmp_path):
    """By hand, with m = 1/2: only the first coordinate is ever sent, the last waits with its momentum."""
    store, compressor = MemoryStore(tmp_path, "run"), Compressor.from_spec("topk(k=1)")
    update = np.array([8.0, 0.0, 1.0], np.float32)
    wanted = [(0.0, 1.0), (1.0, 1.5), (2.5, 1.75)]  # e before the round, u after it
    for server_round, (residual, velocity) in enumerate(wanted, start=1):
        turn = store.begin("c", 3, server_round, server_round - 1)
        np.testing.assert_array_equal(turn.residual, [0.0, 0.0, residual])
        sent = turn.compress(compressor, update, 0, momentum=0.5)
        assert (sent.indices.tolist(), sent.values.tolist()) == ([0], [8.0]), "what was sent has no momentum left"
        turn.commit(encode(sent, compressor, server_round))
        np.testing.assert_array_equal(turn.velocity, [0.0, 0.0, velocity])
    assert update.tolist() == [8.0, 0.0, 1.0]
    with_velocity = store.path("c").stat().st_size
    turn = store.begin("c", 3, 4, 3)
    turn.commit(encode(turn.compress(compressor, update, 0), compressor, 4))
    assert store.begin("c", 3, 5, 4).velocity is None
    assert store.path("c").stat().st_size < with_velocity


def test_files_of_version_1_can_be_read(tmp_path):
    """Written by fedsparse 0.1."""
    store = MemoryStore(tmp_path, "run")
    store.path("c").write_bytes(
        bytes.fromhex("46534d454d010103000000000000000700000000000000030001000500000000000000070000000000000072756e63")
        + np.array([1.0, -2.0, 0.5], "<f4").tobytes()
        + b"frame"
        + b"metrics"
        + bytes.fromhex("3e78786a")
    )
    residual, pending = store.read("c", 3)
    assert residual.tolist() == [1.0, -2.0, 0.5]
    assert (pending.update_id, pending.frame, pending.attachment) == (7, b"frame", b"metrics")
    assert store.begin("c", 3, 7).velocity is None


def test_files_of_version_2_can_be_read(tmp_path):
    path = tmp_path / "7.memory"
    path.write_bytes(
        bytes.fromhex(
            "46534d454d020305000000000000000300000000000000030001000500000000000000040000000000000072756e370000803f0000"
            "0000000000bf0000000000000000000000000000000000000040000000006f12833a6672616d6572657374bb2c5511"
        )
    )
    stored = read_file(path)
    assert stored.residual.tolist() == [1, 0, -0.5, 0, 0]
    assert stored.velocity.tolist() == np.array([0, 0, 2, 0, 1e-3], np.float32).tolist()
    assert (stored.run, stored.client, stored.pending) == ("run", "7", Pending(3, b"frame", b"rest"))


GOLDEN = {  # version 3: mostly zeros; half precision
    False: "46534d454d030120000000000000000300000000000000030001000500000000000000040000000000000072756e37010000803f02"
    "00000000000000400000040000803f000000bf6672616d6572657374",
    True: "46534d454d030120000000000000000300000000000000030001000500000000000000040000000000000072756e37030000803802"
    "0000000000000040000004007400f06672616d6572657374",
}


@pytest.mark.parametrize("half", [False, True])
def test_golden_bytes(tmp_path, half):
    residual = np.zeros(32, np.float32)
    residual[[1, 29]] = 1.0, -0.5
    stored = Stored("run", "7", residual, None, Pending(3, b"frame", b"rest"))
    raw = b"".join(bytes(part) for part in parts_of(stored, half=half))
    assert raw[:-4].hex() == GOLDEN[half]
    (tmp_path / "f").write_bytes(raw)
    again = read_file(tmp_path / "f")
    assert np.array_equal(again.residual, residual)
    assert again.pending == stored.pending


@given(
    hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    st.floats(0, 1),
    st.booleans(),
)
def test_what_is_stored_is_read(vector, zeros, half):
    vector = np.where(np.random.default_rng(0).random(vector.size) < zeros, np.float32(0), vector)
    with tempfile.TemporaryFile() as file:
        for part in pack(vector, half=half):
            file.write(bytes(part))
        size = file.tell()
        file.seek(0)
        again, _ = unpack(file, vector.size)
    assert size <= 13 + vector.size * (2 if half else 4)
    if not half:
        assert np.array_equal(again, vector)
    else:
        largest = np.abs(vector).max(initial=0)
        assert np.all(np.abs(again - vector) <= np.abs(vector) * 2.0**-11 + largest * 2.0**-39)


def test_a_sparse_residual_takes_little_space(tmp_path):
    d = 100_000
    sizes = {}
    for half in (False, True):
        for kept in (d, d // 50):
            store = MemoryStore(tmp_path, f"{half}-{kept}", half=half)
            turn = store.begin("c", d, 1)
            turn.residual[:kept] = 1.5
            turn.commit(b"frame")
            assert np.array_equal(store.begin("c", d, 2, 1).residual, turn.residual)
            sizes[half, kept] = store.path("c").stat().st_size / (4 * d)
    assert sizes[False, d] == pytest.approx(1.0, abs=0.01)
    assert sizes[True, d] == pytest.approx(0.5, abs=0.01)
    assert sizes[False, d // 50] < 0.06
    assert sizes[True, d // 50] < 0.05


def test_not_accepted_mass_returns_once(tmp_path):
    store = MemoryStore(tmp_path, "run")
    committed(store)
    for _ in range(3):  # asking again and again must not add it again and again
        turn = store.begin("c", D, 2, acknowledged=None)
        assert turn.restored
        np.testing.assert_array_equal(turn.residual, np.full(D, 2.0, np.float32))
    assert store.begin("c", D, 2, acknowledged=1).residual.sum() == 2.0 * (D - 1)


def test_an_orphan_is_fenced_off(tmp_path):
    store = MemoryStore(tmp_path, "run")
    orphan = store.begin("c", D, 1)
    successor = MemoryStore(tmp_path, "run").begin("c", D, 1)
    successor.commit(b"")
    with pytest.raises(FencedError, match="took over"):
        orphan.commit(b"")


@pytest.mark.parametrize("client", ["0", "../../etc/passwd", "node 7/ü", "." * 3])
def test_any_client_name_stays_inside_the_folder(tmp_path, client):
    store = MemoryStore(tmp_path / "memory", "run")
    committed(store, client)
    assert store.clients() == [client]
    assert [p.parent for p in tmp_path.rglob("*.memory")] == [tmp_path / "memory" / "run"]


def damage_flip(raw: bytes) -> bytes:
    return raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_flip, "checksum"),
        (lambda raw: raw[:-1], "should have"),
        (lambda raw: raw[:10], "no error memory"),
        (lambda raw: b"", "no error memory"),
        (lambda raw: b"FSMEM\x00" + raw[6:], "no error memory of this version"),
        (lambda raw: raw + b"x", "should have"),
    ],
)
def test_damage_is_an_error_or_a_reported_reset(tmp_path, damage, words):
    store = MemoryStore(tmp_path, "run")
    committed(store)
    store.path("c").write_bytes(damage(store.path("c").read_bytes()))
    with pytest.raises(MemoryStoreError, match=words) as caught:
        store.begin("c", D, 2)
    assert "Delete" in str(caught.value)
    turn = MemoryStore(tmp_path, "run", on_damage="reset").begin("c", D, 2)
    assert words in turn.reset_reason
    assert not turn.residual.any()
    assert store.path("c").with_suffix(".damaged").exists()


def gone(store: MemoryStore) -> None:
    store.path("c").unlink()


def damaged(store: MemoryStore) -> None:
    store.path("c").write_bytes(b"scraps")


@pytest.mark.parametrize(("harm", "on_damage"), [(gone, "raise"), (gone, "reset"), (damaged, "reset")])
def test_a_restart_is_reported_until_the_server_knows(tmp_path, caplog, harm, on_damage):
    """The reply that says so may be lost as often as it likes; once it was accepted, all is as ever."""
    store = MemoryStore(tmp_path, "run", on_damage=on_damage)
    assert store.begin("c", D, 1).reset_reason is None, "there was none before"
    committed(store)
    harm(store)
    assert store.begin("c", D, 2, acknowledged=1).reset_reason, "and the process dies here"
    for update_id in (2, 3, 4):
        turn = store.begin("c", D, update_id, acknowledged=1)
        assert turn.reset_reason, f"update {update_id - 1} was not accepted"
        assert turn.restored == (update_id > 2)
        turn.commit(frame_of(update_id))
        assert store.begin("c", D, update_id, acknowledged=1).resend.update_id == update_id
    assert store.begin("c", D, 5, acknowledged=4).reset_reason is None
    assert "restarts from zero" in caplog.text


def frame_of(update_id: int) -> bytes:
    compressor = Compressor.from_spec("topk(k=1)")
    return encode(compressor.compress(np.ones(D, np.float32), 0), compressor, update_id)


def test_a_restart_that_is_cut_off_is_reported_without_an_accepted_update_too(tmp_path):
    store = MemoryStore(tmp_path, "run", on_damage="reset")
    committed(store)
    damaged(store)
    for _ in range(2):  # killed after the bad file was set aside
        assert store.begin("c", D, 2).reset_reason
    committed(store, update_id=2)
    assert store.begin("c", D, 3, acknowledged=2).reset_reason is None


def test_an_older_copy_is_damage(tmp_path):
    """What of it was sent and accepted since cannot be known; taken as it is, mass would count twice."""
    store = MemoryStore(tmp_path, "run")
    committed(store)
    old = store.path("c").read_bytes()
    committed(store, update_id=2)
    store.path("c").write_bytes(old)
    with pytest.raises(MemoryStoreError, match=r"older copy: the server accepted update 2 .* Delete .*c\.memory"):
        store.begin("c", D, 3, acknowledged=2)
    assert "older copy" in MemoryStore(tmp_path, "run", on_damage="reset").begin("c", D, 3, 2).reset_reason


@pytest.mark.parametrize("d", [0, 1, 7, 16_384, 40_001])
def test_any_changed_number_is_noticed(tmp_path, d):
    """A flipped bit anywhere, and two blocks of 64 KiB that changed places."""
    store, rng = MemoryStore(tmp_path, "run"), np.random.default_rng(d)
    turn = store.begin("c", d, 1)
    turn.residual[:] = rng.standard_normal(d)
    turn.velocity = rng.standard_normal(d).astype(np.float32)
    turn.commit(b"frame")
    raw = store.path("c").read_bytes()
    assert np.array_equal(store.begin("c", d, 2, 1).velocity, turn.velocity)
    changed = []
    for bit in rng.integers(0, 8 * len(raw), 200):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(flipped)
    if d > 32_768:
        start, block = len(raw) - 4 - len(b"frame") - 8 * d, 65_536
        first, second = raw[start : start + block], raw[start + block : start + 2 * block]
        changed.append(raw[:start] + second + first + raw[start + 2 * block :])
    for damaged in changed:
        store.path("c").write_bytes(damaged)
        with pytest.raises(MemoryStoreError):
            store.begin("c", d, 2, 1)


def test_foreign_memory_is_refused(tmp_path):
    committed(MemoryStore(tmp_path, "run"))
    other = MemoryStore(tmp_path, "../other run")
    assert not other.begin("c", D, 2).residual.any(), "another run has its own memory"
    os.link(tmp_path / "run" / "c.memory", other.path("c"))
    with pytest.raises(MemoryStoreError, match="belongs to client 'c' of run 'run'"):
        other.begin("c", D, 2)
    with pytest.raises(MemoryStoreError, match=f"model of {D} parameters, this one has 7"):
        MemoryStore(tmp_path, "run").begin("c", 7, 2)
    os.rename(tmp_path / "run" / "c.memory", tmp_path / "run" / "x.memory")
    with pytest.raises(MemoryStoreError, match="expected client 'x'"):
        MemoryStore(tmp_path, "run").begin("x", D, 2)


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path):
    """A file-size limit of the process is a disk that fills up in the middle of a commit."""
    store = MemoryStore(tmp_path, "run")
    committed(store)
    before = store.path("c").read_bytes()
    program = (
        "import resource, signal, sys, numpy as np\n"
        "from fedsparse.compression import MemoryStore, MemoryStoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"store = MemoryStore(sys.argv[1], 'run'); turn = store.begin('c', {D}, 2)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\n"
        "try: turn.commit(b'frame')\n"
        "except MemoryStoreError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "What was stored before is intact" in done.stdout
    assert store.path("c").read_bytes() == before
    assert {file.suffix for file in store.directory.iterdir()} == {".memory", ".epoch"}


@pytest.mark.parametrize("durable", [False, True])
def test_a_commit_that_is_cut_short_anywhere_leaves_the_old_or_the_new_memory(tmp_path, durable):
    """The files as a killed process leaves them: the new one half written, whole, or whole with the old one gone."""
    store = MemoryStore(tmp_path, "run", durable=durable)
    committed(store, value=1.0)
    path = store.path("c")
    old, ahead = path.read_bytes(), path.with_suffix(".next")
    committed(store, value=9.0, update_id=2)
    new = path.read_bytes()
    for files, value in [
        ({path: old, ahead: new[:50]}, 1.0),
        ({path: old, ahead: new}, 1.0),
        ({ahead: new}, 10.0),
        ({path: new}, 10.0),
        ({path.with_suffix(".partial"): new[:50]}, 0.0),  # of the very first commit
    ]:
        for file in (path, ahead):
            file.unlink(missing_ok=True)
        for file, content in files.items():
            file.write_bytes(content)
        residual, _ = store.read("c", D)
        assert residual.max() == value
        committed(store, value=2.0, update_id=3)
        assert store.read("c", D)[0].max() >= 2.0
        assert path.exists()
    path.write_bytes(new[:-1])
    ahead.write_bytes(new)
    with pytest.raises(MemoryStoreError, match=r"Delete .*c\.memory"):
        store.begin("c", D, 4)
    path.unlink()
    assert not store.begin("c", D, 4).residual.any(), "deleted as told, it restarts from zero"
    ahead.write_bytes(new[:50])
    with pytest.raises(MemoryStoreError, match=r"Delete .*c\.next"):
        store.begin("c", D, 4)


def test_kill_9_at_any_moment_leaves_a_valid_memory(tmp_path):
    """A process that commits without pause is killed; what it leaves is the memory after some whole commit."""
    program = (
        "import sys, numpy as np\n"
        "from fedsparse.compression import MemoryStore\n"
        "store = MemoryStore(sys.argv[1], 'run'); i = 0\n"
        "while True:\n"
        "    i += 1; turn = store.begin(sys.argv[2], 200_000, i, i - 1)\n"
        "    turn.residual[:] = i; turn.commit(b'')\n"
        "    print(i, flush=True)\n"
    )
    store = MemoryStore(tmp_path, "run")
    for trial in range(5):
        command = [sys.executable, "-c", program, str(tmp_path), str(trial)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(3 + 7 * trial):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = max([last, *map(int, process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        residual, pending = store.read(str(trial), 200_000)
        assert pending.update_id in (last, last + 1)
        assert (residual == pending.update_id).all()


def test_many_threads_and_clients_do_not_disturb_each_other(tmp_path):
    store = MemoryStore(tmp_path, "run")
    threads = [threading.Thread(target=committed, args=(store, str(c), float(c))) for c in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read(str(c), D)[0].max() for c in range(16)] == [float(c) for c in range(16)]


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryStoreError, match="cannot create"):
        MemoryStore(tmp_path / "file" / "memory", "run")
