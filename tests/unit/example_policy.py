"""The example of docs/policies.md, run by test_policy_example.py."""

from tokenrouter.policies.base import Handoff, Policy, PolicyParams, Visit


class LowConfidence(Policy):
    """The large model writes one token wherever the small one's best token is unlikely."""

    name = "low_confidence"
    two_models = True

    class Params(PolicyParams):
        threshold: float = 0.5

    def receive(self, row):
        return Visit(limit=1, then=self.models[0]) if row.model == self.models[1] else Visit()

    def route(self, batch):  # batch.logits: [B, V]; the answer: [B] bool, True = the other model
        return batch.logits.softmax(-1).amax(-1) < self.params.threshold

    def send(self, row, target):
        return Handoff(keep_token=False)  # the doubtful token is not part of the response
