"""The queue hands out every task once, never two of a client at a time, whatever happens to the workers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedsparse.engine.task_queue import Task, TaskQueue

from .conftest import ask


@given(
    clients=st.lists(st.integers(0, 4), max_size=30),
    fates=st.lists(st.sampled_from(["done", "died", "unwanted"]), max_size=60),
    slots=st.integers(1, 3),
    max_batch=st.integers(1, 8),
    seconds=st.sampled_from([1e-5, 1e-3, 1.0]),
    times=st.lists(st.integers(0, 4), max_size=6),
)
def test_every_task_runs_and_no_client_twice_at_once(
    clients: list[int], fates: list[str], slots: int, max_batch: int, seconds: float, times: list[int]
) -> None:
    queue = TaskQueue(max_batch, target_s=0.02)
    tasks = [
        Task(str(number), client, ask("train" if client else "evaluate", [client])[0], [], frozenset())
        for number, client in enumerate(clients)
    ]
    for number, client in enumerate(times):  # what earlier rounds showed
        queue.observe([Task(f"earlier {number}", client, ask("train", [client])[0], [], frozenset())], 0.1 * number)
    queue.add(tasks)
    running: list[list[Task]] = []
    finished: list[Task] = []
    dropped: list[Task] = []
    script: list[Any] = list(fates)
    while True:
        while len(running) < slots and (batch := queue.next_batch(slots)):
            assert len(batch) <= max_batch
            assert len({task.message.metadata.message_type for task in batch}) == 1
            assert len(batch) == 1 or not any(task.deaths for task in batch)
            running.append(batch)
            flat = [task.client for each in running for task in each]
            assert len(flat) == len(set(flat))
        if not running:
            break
        batch = running.pop(0)
        match script.pop(0) if script else "done":
            case "died":
                for task in batch:
                    task.deaths += 1
                queue.add_first(batch)
            case "unwanted":
                for task in batch:
                    task.wanted = False
                queue.add_first(batch)
                dropped += batch
            case _:
                queue.observe(batch, seconds * len(batch))
                for task in batch:
                    queue.done(task)
                finished += batch
    assert sorted(finished + dropped, key=lambda task: int(task.id)) == tasks
    for client in set(clients):
        order = [int(task.id) for task in finished if task.client == client]
        assert order == sorted(order)


def test_batches_grow_with_speed_and_shrink_at_the_end() -> None:
    queue = TaskQueue(16, target_s=0.02)
    queue.add(Task(str(i), i, ask("train", [i])[0], [], frozenset()) for i in range(100))
    first = queue.next_batch(2)
    assert len(first) == 1  # nothing is known yet: a slow client must not hold up others
    queue.observe(first, 0.0001)
    sizes = []
    while batch := queue.next_batch(2):
        sizes.append(len(batch))
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    queue.add(Task(str(i), i + 200, ask("train", [i])[0], [], frozenset()) for i in range(100))
    queue.observe(first * 9, 9.0)
    assert len(queue.next_batch(2)) == 1  # clients that take long travel alone


def test_the_slowest_clients_go_first_once_they_are_known() -> None:
    queue = TaskQueue(16, target_s=0.02)

    def order() -> list[int]:
        queue.add(Task(str(i), i, ask("train", [i])[0], [], frozenset()) for i in range(5))
        found = []
        while batch := queue.next_batch(2):
            found += [task.client for task in batch]
            for task in batch:
                queue.observe([task], seconds[task.client])
                queue.done(task)
        return found

    seconds = [0.02, 0.5, 0.02, 2.0, 0.1]
    assert order() == [0, 1, 2, 3, 4]
    assert order() == [3, 1, 4, 0, 2]
    seconds = [1e-4] * 5
    queue = TaskQueue(16, target_s=0.02)
    assert order() == order() == [0, 1, 2, 3, 4]  # it does not matter: the order of arrival
