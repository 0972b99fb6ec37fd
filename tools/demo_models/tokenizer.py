"""The tokenizer that both demo models share: bytes, and a few special tokens.

Routing between models needs one vocabulary. Bytes keep it tiny (an embedding is a large part of a model this small),
give every digit its own token, and encode any Unicode text, so that no client input can fail.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
# Room for deployments that want a control token without retraining. The models never saw these.
RESERVED = tuple(f"<|reserved_{index}|>" for index in range(4))
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *RESERVED)
END_OF_TEXT_ID = 256
PAD_ID = 257
MAX_LENGTH = 1024


def build_tokenizer() -> Tokenizer:
    """Builds the tokenizer: ids 0..255 are byte symbols in a fixed order, the special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # The prefix space and the regular expression serve merges; without merges they would only change the text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": list(RESERVED),
        "add_bos_token": False,
        # Clean-up joins " ," to ",": an answer would not decode to what was generated.
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        # The models know one turn only: the last message is the problem.
        "chat_template": "{{ messages[-1]['content'] }}",
    }


def save_tokenizer(folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, which ``transformers.AutoTokenizer`` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
