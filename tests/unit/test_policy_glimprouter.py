"""GlimpRouter: the entropy vectors, steps by text, what is discarded, the end of thinking, lost state."""

import math

import numpy as np
import pytest

from tests.unit.policy_harness import Driver, FakeRow, Request, decide, make
from tests.unit.text_tokenizer import tokenizer_of
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import RouteBatch

torch = pytest.importorskip("torch")

PIECES = ["a", "b", "c", ".\n\n", "\n", "\n\n", "</", "think", ">", "end"]
A, B, C, STOP, NEWLINE, BLANK, OPEN, THINK, CLOSE, END = range(10)
THINK_END = 10
VOCABULARY = 40
TOKENIZER = tokenizer_of(PIECES, ["</think>"])


def policy(**params):
    return make("glimprouter", params, tokenizer=TOKENIZER)


def sure(token):
    """[V] logits with an entropy of almost 0."""
    row = np.zeros(VOCABULARY)
    row[token] = 50.0
    return row


def unsure(token):
    """[V] logits whose largest 20 have an entropy of almost ln 20; `token` is the argmax."""
    row = np.zeros(VOCABULARY)
    row[token] = 0.01
    return row


def script(small, large):
    """Fake models that write given logits by position; the prompt is one token."""
    return {
        "small": lambda tokens: (small[len(tokens) - 1], None),
        "large": lambda tokens: (large[len(tokens) - 1], None),
    }


def reference_entropy(log_probs, top):
    q = np.sort(np.exp(log_probs))[::-1][:top]
    q = q / q.sum()
    return -sum(x * math.log(x) for x in q if x > 0)


@pytest.mark.parametrize(
    ("log_probs", "entropy", "at_09", "at_10"),
    [
        ((-0.5, -1.5, -2.5, -3.0), 0.993015, "large", "small"),
        ((-0.9, -1.2, -2.0, -2.3), 1.244072, "large", "large"),
    ],
)
def test_vectors_of_four_tokens(log_probs, entropy, at_09, at_10):
    """The four are the top; what is left of the mass lies below the top and does not count."""
    logits = [*log_probs, -60.0]
    assert float(policy(top=4)._entropy(torch.tensor([logits]))) == pytest.approx(entropy, abs=1e-6)
    for threshold, want in ((0.9, at_09), (1.0, at_10)):
        assert decide(policy(top=4, threshold=threshold), [logits], rows=[FakeRow()]) == [want]


def test_vector_of_a_uniform_distribution():
    assert float(policy()._entropy(torch.zeros(1, 100))) == pytest.approx(2.995732, abs=1e-6)
    assert float(policy(top=100)._entropy(torch.zeros(1, 100))) == pytest.approx(4.605170, abs=1e-6)


def test_exactly_at_the_threshold_goes_to_the_large_model():
    h = float(policy()._entropy(torch.zeros(1, 100)))
    assert decide(policy(threshold=h), np.zeros((1, 100)), rows=[FakeRow()]) == ["large"]
    assert decide(policy(threshold=h + 1e-5), np.zeros((1, 100)), rows=[FakeRow()]) == ["small"]


def test_glimpses_equal_the_reference_alone_and_batched():
    logits = np.random.default_rng(0).normal(scale=2.5, size=(60, VOCABULARY)).astype(np.float32)
    entropies = [reference_entropy(row - np.log(np.exp(row).sum()), 20) for row in logits.astype(np.float64)]
    threshold = float(np.median(entropies)) + 1e-4
    want = ["large" if h >= threshold else "small" for h in entropies]
    # Tokens that end no step, so that only the glimpse decides.
    tokens = [A] * 60
    assert decide(policy(threshold=threshold), logits, tokens=tokens, rows=[FakeRow() for _ in want]) == want
    alone = [decide(policy(threshold=threshold), logits[i : i + 1], tokens=[A], rows=[FakeRow()])[0] for i in range(60)]
    assert alone == want


def test_large_model_writes_whole_steps_and_the_small_one_glimpses_each():
    small = [sure(A), sure(STOP), unsure(B), unsure(C), None, sure(A), unsure(A), sure(END)]
    large = [None, None, sure(C), unsure(C), sure(BLANK)]
    (trace,) = Driver(policy(), script(small, large), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.tokens == [A, STOP, C, C, BLANK, A, A, END]
    assert trace.writers == ["small"] * 2 + ["large"] * 3 + ["small"] * 3
    # Only the glimpsed token of the step that went to the large model; unsure tokens within a step do not matter.
    assert trace.discarded == [("small", 2, B)]


def test_first_token_of_the_response_can_be_a_trigger_and_an_end_token_there_is_discarded():
    large = [sure(C), sure(STOP)]
    (trace,) = Driver(policy(), script([unsure(END)], large), max_tokens=2, end_ids=(END,)).run([Request([7])])
    assert trace.tokens == [C, STOP]
    assert trace.discarded == [("small", 0, END)]


@pytest.mark.parametrize(
    "pieces",
    [[A, NEWLINE, NEWLINE], [A, STOP], [BLANK], [STOP]],
    ids=["two-tokens", "inside-a-token", "empty-step", "token-alone"],
)
def test_step_ends_by_text_wherever_tokens_begin(pieces):
    large = [sure(token) for token in pieces]
    small = [unsure(B)] + [None] * (len(pieces) - 1) + [sure(END)]
    (trace,) = Driver(policy(), script(small, large), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.tokens == [*pieces, END]
    assert trace.writers == ["large"] * len(pieces) + ["small"]


def test_a_separator_across_two_steps_ends_nothing():
    """Step 1 ends with a blank line; a newline that begins step 2 does not make another one with it."""
    small = [sure(A), sure(BLANK), sure(NEWLINE), unsure(B), sure(END)]
    (trace,) = Driver(policy(), script(small, []), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.writers == ["small"] * 5
    assert trace.discarded == []


def test_step_limit_ends_a_step_on_both_models():
    small = [unsure(A), None, sure(A), unsure(A), unsure(B)]
    large = [sure(C), sure(C), None, None, sure(END)]
    (trace,) = Driver(policy(step_limit=2), script(small, large), max_tokens=5).run([Request([7])])
    assert trace.tokens == [C, C, A, A, END]
    assert trace.discarded == [("small", 0, A), ("small", 4, B)]


@pytest.mark.parametrize("closing", [[THINK_END], [OPEN, THINK, CLOSE]], ids=["special-token", "three-tokens"])
def test_answer_is_written_by_the_large_model_only(closing):
    small = [sure(A), *map(sure, closing)]
    large = [None] * len(small) + [sure(BLANK), sure(A), sure(BLANK), sure(END)]
    (trace,) = Driver(policy(), script(small, large), max_tokens=20, end_ids=(END,)).run([Request([7])])
    assert trace.tokens == [A, *closing, BLANK, A, BLANK, END]
    assert trace.writers == ["small"] * len(small) + ["large"] * 4
    assert trace.discarded == []


def test_large_model_that_closes_the_thinking_stays():
    large = [sure(C), sure(THINK_END), sure(BLANK), sure(END)]
    (trace,) = Driver(policy(), script([unsure(A)], large), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.tokens == [C, THINK_END, BLANK, END]
    assert trace.writers == ["large"] * 4


def test_two_equal_steps_from_the_third_on_end_the_thinking():
    small = [sure(B), sure(BLANK)] + [sure(A), sure(BLANK)] * 2
    large = [None] * 6 + [sure(C), sure(END)]
    (trace,) = Driver(policy(), script(small, large), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.writers == ["small"] * 6 + ["large"] * 2
    (trace,) = Driver(policy(stop_repeated=False), script([*small, sure(END)], []), max_tokens=9, end_ids=(END,)).run(
        [Request([7])]
    )
    assert trace.writers == ["small"] * 7


def test_two_equal_steps_at_the_beginning_do_not_end_it():
    small = [sure(A), sure(BLANK)] * 2 + [sure(B), sure(END)]
    (trace,) = Driver(policy(), script(small, []), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.writers == ["small"] * 6


def test_spent_thinking_budget_hands_over_at_the_end_of_the_step():
    small = [sure(A), sure(BLANK), sure(B), sure(B), sure(BLANK)]
    large = [None] * 5 + [sure(C), sure(END)]
    (trace,) = Driver(policy(think_limit=3), script(small, large), max_tokens=9, end_ids=(END,)).run([Request([7])])
    assert trace.writers == ["small"] * 5 + ["large"] * 2


def random_models(seed):
    rng = np.random.default_rng(seed)
    table = {name: rng.normal(scale=2.0, size=(60, VOCABULARY)) for name in ("small", "large")}
    for rows in table.values():
        rows[:, STOP] += 2.0
        rows[:, THINK_END + 1 :] -= 4.0
    return {name: (lambda tokens, rows=rows: (rows[len(tokens) - 1], None)) for name, rows in table.items()}


def reference_writers(models, threshold, count):
    """The loop of the source over whole steps, greedy: who wrote what."""
    tokens, writers, step = [], [], []
    model = None
    while len(tokens) < count:
        if model is None:
            row = models["small"]([7, *tokens])[0]
            h = reference_entropy(row - np.log(np.exp(row).sum()), 20)
            model, step = ("large" if h >= threshold else "small"), []
        token = int(np.argmax(models[model]([7, *tokens])[0]))
        tokens.append(token)
        writers.append(model)
        step.append(token)
        text = TOKENIZER.decode(step, skip_special_tokens=False)
        if "</think>" in text:
            return writers + ["large"] * (count - len(writers))
        if "\n\n" in text:
            model = None
    return writers


def test_whole_responses_equal_the_loop_of_the_source():
    for seed in range(8):
        models = random_models(seed)
        (trace,) = Driver(policy(threshold=1.9, stop_repeated=False), models, max_tokens=40).run([Request([7])])
        assert trace.writers == reference_writers(models, 1.9, 40)
        assert set(trace.writers) == {"small", "large"}


def test_responses_do_not_depend_on_the_batch():
    models = random_models(1)
    # Other prompt lengths, other positions in the script.
    requests = [Request([7] * n) for n in range(1, 6)]
    together = Driver(policy(threshold=1.9), models, max_tokens=30).run(requests)
    alone = [Driver(policy(threshold=1.9), models, max_tokens=30).run([request])[0] for request in requests]
    assert [t.writers for t in together] == [t.writers for t in alone]
    assert [t.tokens for t in together] == [t.tokens for t in alone]


def test_state_that_was_lost_is_made_again_from_the_tokens():
    """A subserver that restarted gets the whole history with the state of the last hand-off, or with none."""
    history = [A, STOP, B, B]
    row = FakeRow(tokens=[7, *history], prompt_tokens=1, position=4)
    policy().receive(row)
    assert (row.state["start"], row.state["steps"], row.state["seen"]) == (2, 1, 4)
    # In the middle of a step: no glimpse, however unsure.
    assert decide(policy(), [unsure(A)], tokens=[A], rows=[row]) == ["small"]
    answered = FakeRow(model="large", tokens=[7, A, THINK_END, STOP], prompt_tokens=1, position=3)
    policy().receive(answered)
    assert decide(policy(), [sure(STOP)], tokens=[STOP], rows=[answered], model="large") == ["large"]


def test_one_host_sync_per_step(monkeypatch):
    rows = [FakeRow(), FakeRow(position=1)]
    instance = policy()
    batch = RouteBatch("small", rows, torch.tensor([A, B]), torch.tensor(np.stack([unsure(A), sure(B)])).float())
    calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(1) or tolist(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a second sync"))
    assert instance.route(batch) == ["large", "small"]
    assert len(calls) == 1


def test_refusals():
    missing = make("glimprouter")
    missing.prepare("")
    with pytest.raises(ConfigError, match="needs 'tokenizer'"):
        missing.prepare("small")
    with pytest.raises(InvalidRequest, match="threshold is -1"):
        policy(threshold=-1.0)
    with pytest.raises(InvalidRequest, match="separator is empty"):
        policy(separator="")
    with pytest.raises(InvalidRequest, match="top is 1"):
        policy(top=1)
