from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.engines.torch.batch import Costs, plan_groups

COSTS = Costs(per_score=100, per_key=10, per_group=50_000)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), min_size=1, max_size=20))
@settings(max_examples=200)
def test_groups_are_a_partition_and_never_cost_more_than_one_by_one(sizes: list[tuple[int, int]]) -> None:
    counts, ends = [new for new, _ in sizes], [new + old for new, old in sizes]
    groups = plan_groups(counts, ends, COSTS)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))

    def cost(parts: list[list[int]]) -> int:
        return sum(
            COSTS.of(len(p), max(counts[i] for i in p), max(ends[i] for i in p)) + COSTS.per_group for p in parts
        )

    assert cost(groups) <= cost([[i] for i in range(len(sizes))])


def test_similar_decodes_are_one_group_in_their_order_and_a_long_prompt_is_its_own() -> None:
    assert plan_groups([1] * 4, [50, 20, 40, 30], COSTS) == [[0, 1, 2, 3]]
    assert plan_groups([1, 200, 1], [50, 200, 40], COSTS) == [[2, 0], [1]]
