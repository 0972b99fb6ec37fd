"""What was written: tokens, text, stop words, log-probabilities, and who wrote them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import TOKENIZER, request, writers
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.response import Update

A, B = TOKENIZER.encode("ab").ids
LETTERS = {A: "a", B: "b"}


@dataclass
class Commit:
    """What one report brings; `write`: whether clients are told before the next one."""

    model: str
    tokens: list[int]
    write: bool


COMMITS = st.lists(
    st.builds(
        Commit,
        model=st.sampled_from(["small", "large"]),
        tokens=st.lists(st.sampled_from([A, B]), min_size=1, max_size=4),
        write=st.booleans(),
    ),
    max_size=8,
)


def kept(tokens: list[int], words: list[str], min_tokens: int) -> int:
    """Naive: how many tokens stand before and in the first stop word that ends behind `min_tokens`."""
    text = "".join(LETTERS[token] for token in tokens)
    ends = range(min_tokens + 1, len(text) + 1)
    return next((end for end in ends if any(word and text[:end].endswith(word) for word in words)), len(text))


@settings(max_examples=300)
@given(
    commits=COMMITS,
    words=st.lists(st.text(alphabet="ab", max_size=5), max_size=2),
    min_tokens=st.integers(0, 6),
    stream=st.booleans(),
)
def test_however_tokens_arrive_the_response_is_theirs_up_to_the_first_stop_word(
    commits: list[Commit], words: list[str], min_tokens: int, stream: bool
) -> None:
    what = request([A], max_tokens=40, min_tokens=min_tokens, stop_words=tuple(words), stream=stream)
    transcript = Transcript(7, what, TOKENIZER)
    updates: list[Update] = []
    update = None
    for now_ns, commit in enumerate(commits, start=1):
        log_probs = [float(-token) for token in commit.tokens]
        update = transcript.commit(list(commit.tokens), log_probs, model=commit.model, now_ns=now_ns)
        updates.append(update)
        if transcript.stopped:
            break
        if commit.write:
            transcript.write()
    last = transcript.finish(update)

    sent = [token for commit in commits for token in commit.tokens]
    want = sent[: kept(sent, words, min_tokens)]
    assert transcript.tokens == want
    assert transcript.text == "".join(LETTERS[token] for token in want)
    assert transcript.log_probs == [float(-token) for token in want]
    assert transcript.stopped == (
        len(want) > min_tokens and any(word and transcript.text.endswith(word) for word in words)
    )
    who = [commit.model for commit in commits for _ in commit.tokens][: len(want)]
    assert [run.model for run in transcript.runs for _ in range(run.start, run.end)] == who
    assert all(one.model != two.model for one, two in zip(transcript.runs, transcript.runs[1:], strict=False))
    assert transcript.tokens_by_model(("small", "large")) == {name: who.count(name) for name in ("small", "large")}

    told = updates if stream and updates else [last]
    assert last.key == 7
    assert "".join(each.text for each in told) == transcript.text
    assert [token for each in told for token in each.tokens] == want
    assert [value for each in told for value in each.log_probs] == transcript.log_probs
    assert [run.model for each in told for run in each.runs for _ in range(run.start, run.end)] == who


def test_the_text_of_a_token_is_written_when_it_is_told_not_when_it_is_committed() -> None:
    transcript = Transcript(1, request([A], stream=True), TOKENIZER)
    update = transcript.commit([A, B], None, model="small", now_ns=5)
    assert (update.tokens, update.text) == ([A, B], "")
    transcript.write()
    assert update.text == "ab"
    transcript.commit([B], None, model="large", now_ns=9)
    assert (transcript.first_token_ns, transcript.last_token_ns) == (5, 9)


def test_streamed_updates_join_to_the_result_and_others_get_one_update() -> None:
    cluster = Cluster()
    streamed = cluster.submit(request(list(b"hello you"), max_tokens=20, stream=True, log_probs=True))
    whole = cluster.submit(request(list(b"hello you"), max_tokens=20, log_probs=True))
    cluster.run()
    (single,) = cluster.updates[whole]
    deltas = cluster.updates[streamed]
    assert len(deltas) > 1
    result = cluster.result(streamed)
    assert "".join(update.text for update in deltas) == single.text == result.text
    assert [token for update in deltas for token in update.tokens] == single.tokens == result.tokens
    assert [value for update in deltas for value in update.log_probs] == single.log_probs == result.log_probs
    assert len(single.log_probs) == len(single.tokens)
    assert all(later.start == earlier.end for earlier, later in zip(single.runs, single.runs[1:], strict=False))


def test_merged_updates_say_what_the_single_ones_said() -> None:
    cluster = Cluster()
    key = cluster.submit(request(list(b"hello you"), max_tokens=20, stream=True, log_probs=True))
    cluster.run()
    updates = cluster.updates[key]
    for cut in range(1, len(updates)):
        merged = Update(key)
        for update in updates[:cut]:
            merged.merge(update)
        assert not merged.final
        for update in updates[cut:]:
            merged.merge(update)
        result = cluster.result(key)
        assert (merged.text, merged.tokens, merged.log_probs) == (result.text, result.tokens, result.log_probs)
        assert merged.result is result
        assert [run.model for run in merged.runs for _ in range(run.start, run.end)] == writers(result)
