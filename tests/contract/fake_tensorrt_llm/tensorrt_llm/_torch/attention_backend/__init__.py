"""What a model's forward is told about its batch."""

from __future__ import annotations

import torch


class AttentionMetadata:
    """Lengths of the sequences on the packed token axis, context requests first.

    Attributes:
        seq_lens: [n] int32 on the host, new tokens of each sequence.
        seq_lens_cuda: the same where the model is.
        request_ids: ids inside the executor, on the host.
        num_contexts: how many of the sequences are context requests.
    """

    def __init__(self, lengths: list[int], request_ids: list[int], num_contexts: int, device: torch.device) -> None:
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.seq_lens_cuda = self.seq_lens.to(device)
        self.request_ids = request_ids
        self.num_contexts = num_contexts

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.request_ids)
