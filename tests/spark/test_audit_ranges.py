"""The parts of an audit, put together without Spark, against a plain loop over single messages."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe_spark.dedupe import (
    DOUBLED,
    EXAMPLES,
    OUT_OF_ORDER,
    ROWS_SCHEMA,
    SUMMARY,
    Judgement,
    TopicMerge,
    judge,
    summarise,
    suspect_rows,
)
from tests.spark.histories import Told, cut, stored, told_batches, truth

LINKS = {"all": {}, "after_first": {"first_links_prove": False}, "none": {"links_prove": False}}


def look(
    history: list[Told], cuts: list[int], links: str = "all", tasks: int = 1, first_index: int = 0
) -> tuple[TopicMerge, Judgement]:
    """What an audit of one topic does, with its ranges cut at these places and its late messages in this many tasks."""
    batches = stored(history, first_index)
    end = first_index + sum(map(len, batches))
    edges = sorted({first_index, *(first_index + c for c in cuts if first_index + c < end), end})
    spans = list(pairwise(edges))
    merge = TopicMerge(**LINKS[links])
    for number, (first, stop) in enumerate(spans):
        merge.add(pa.Table.from_batches([summarise(number, cut(batches, first, stop))], SUMMARY))
    rows = pa.Table.from_batches([], ROWS_SCHEMA)
    for (first, stop), suspects in zip(spans, merge.suspects(), strict=True):
        if suspects is not None:
            found = list(suspect_rows(7, cut(batches, first, stop), suspects))
            rows = pa.concat_tables([rows, pa.Table.from_batches(found, ROWS_SCHEMA)])
    judgement = Judgement()
    task_of = rows["sequence_id"].to_numpy() % tasks
    for task in range(tasks):
        mine = rows.filter(pa.array(task_of == task))
        mine = mine.sort_by([(name, "ascending") for name in ("topic", "producer", "sequence_id", "index")])
        judgement.merge(judge(mine.combine_chunks().to_batches(max_chunksize=2)))
    return merge, judgement


def check(history: list[Told], merge: TopicMerge, judgement: Judgement, links: str, first_index: int = 0) -> None:
    expected = truth(history, first_index, links=links)
    names = [name.decode() for name in merge.producers.names()]
    assert merge.messages == sum(len(told.rows) for told in history)
    assert merge.unlinked == expected.unlinked
    assert merge.missing == expected.missing.total()
    assert {names[number] for number in merge.incomplete} == set(expected.missing)
    # Which of a batch's holes come first is a matter of taste; the earliest batches' are shown.
    shown = [(hole.index, hole.producer.decode(), hole.link, hole.before) for hole in merge.holes]
    assert shown == sorted(expected.missing_at)[:EXAMPLES]
    for kind, counts, examples in (
        (DOUBLED, expected.doubled, expected.doubled_at),
        (OUT_OF_ORDER, expected.out_of_order, [(*one, None) for one in expected.out_of_order_at]),
    ):
        assert {names[p]: n for (one, topic, p), n in judgement.counts.items() if one == kind} == counts
        late = judgement.examples.get((kind, 7), [])
        found = [
            (one.index, names[one.producer], one.sequence_id, one.other if kind == DOUBLED else None) for one in late
        ]
        assert found == examples[:EXAMPLES]
        assert kind == DOUBLED or all(one.other >= one.sequence_id for one in late)


@given(
    history=st.lists(told_batches(), max_size=14),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    links=st.sampled_from(list(LINKS)),
    tasks=st.integers(1, 3),
    first_index=st.sampled_from([0, 10**12]),
)
def test_it_finds_what_a_plain_loop_finds_wherever_the_ranges_are_cut(
    history: list[Told], cuts: list[int], links: str, tasks: int, first_index: int
) -> None:
    merge, judgement = look(history, cuts, links, tasks, first_index)
    check(history, merge, judgement, links, first_index)


def clean_history() -> list[Told]:
    return [Told([("a", 10 * i), ("b", i), ("a", 10 * i + 3)], {"a": 10 * i - 7, "b": i - 1}) for i in range(1, 40)]


def test_a_clean_topic_is_clean_and_is_not_looked_at_twice() -> None:
    history = [Told([("a", 3), ("b", 0)], {"a": -1, "b": -1}), *clean_history()]
    merge, judgement = look(history, [5, 17, 40])
    assert not merge.missing
    assert list(merge.suspects()) == [None] * 4
    assert not judgement.counts


def test_a_message_that_is_lost_from_anywhere_but_the_end_is_found() -> None:
    """Each batch omitted in turn, as if the log had lost it: the next one's links show it."""
    history = [Told([("a", 3), ("b", 0)], {"a": -1, "b": -1}), *clean_history()]
    for lost in range(len(history) - 1):
        merge, judgement = look(history[:lost] + history[lost + 1 :], [20, 50])
        assert merge.missing == 2, lost
        assert not judgement.counts


def test_only_ids_near_late_messages_are_looked_at_again() -> None:
    history = [Told([("a", i)], {"a": i - 1}) for i in range(200)]
    history[150:150] = [Told([("a", i)], {"a": i - 1}) for i in range(140, 150)]
    batches = stored(history)
    merge = TopicMerge()
    merge.add(pa.Table.from_batches([summarise(0, batches)]))
    (suspects,) = merge.suspects()
    assert suspects is not None
    rows = pa.Table.from_batches(suspect_rows(0, batches, suspects))
    assert sorted(rows["sequence_id"].to_pylist()) == sorted([*range(140, 150)] * 2)


@pytest.mark.parametrize("tasks", [1, 2])
def test_many_copies_of_one_message_over_many_batches(tasks: int) -> None:
    history = [Told([("a", 1)], {"a": -1}), Told([("a", 2)], {"a": 1}), *[Told([("a", 1)], {"a": -1})] * 9]
    merge, judgement = look(history, [2, 4, 6, 8], tasks=tasks)
    check(history, merge, judgement, "all")
    assert judgement.counts == {(DOUBLED, 7, 0): 9}
    assert {one.other for one in judgement.examples[DOUBLED, 7]} == {0}


def test_an_empty_range_is_an_empty_summary() -> None:
    summary = summarise(3, [])
    assert summary.schema == SUMMARY
    assert not len(summary)
    assert np.array_equal(TopicMerge().producers.names(), [])
