"""What a model's forward is told about its batch."""

from __future__ import annotations

import torch


class AttentionMetadata:
    """Lengths of the sequences on the packed token axis, context requests first.

    Attributes:
        seq_lens_cuda: [n] int32 where the model is, new tokens of each sequence.
        request_ids: ids inside the executor, on the host.
        num_contexts: how many of the sequences are context requests.
    """

    def __init__(self, lengths: list[int], request_ids: list[int], num_contexts: int, device: torch.device) -> None:
        self.seq_lens_cuda = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.request_ids = request_ids
        self.num_contexts = num_contexts
