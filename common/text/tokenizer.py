"""The tokenizer of a served model directory: text and chats to token ids, token ids back to text.

Loads tokenizer.json with the `tokenizers` library alone (no transformers, no torch: a worker process starts in a
fraction of a second) and renders the chat template in a sandbox, so that ids equal apply_chat_template(tokenize=True).
Everything here blocks; callers run it in threads (encoding releases the interpreter lock) or in a process of its own.
Knows nothing of HTTP or of requests. Called by decoded/api, by start-up and by the importer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

from common.errors import InvalidRequest, StartupError
from common.text.chat_template import ChatTemplate
from common.text.detokenizer import BYTE_OF_CHAR, Detokenizer, PieceTable

_PREFIX_SLACK_TOKENS = 64
_PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe: the backing tokenizer is never changed after loading."""

    def __init__(self, backend: RustTokenizer, template: ChatTemplate | None, source: str = "") -> None:
        self.source = source  # the directory it was loaded from, "" for bytes_only()
        self._backend = backend
        self._template = template
        self._pieces = PieceTable(backend)
        self.num_prefix = _num_prefix(self._encode("a", True), self._encode("a", False))  # such as a BOS
        self.num_tokens = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, model_dir: Path | str) -> Tokenizer:
        """Load tokenizer.json, tokenizer_config.json and the chat template of a model directory.

        Raises:
            StartupError: a file is missing or unreadable; the message names it.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"The model directory {folder} has no tokenizer.json.")
        try:
            backend = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path} is not a tokenizer file: {error}.") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_config(folder / "tokenizer_config.json")
        special = _special_tokens(config)
        source = _template_source(folder, config)
        template = ChatTemplate(source, special, f"{folder}: the chat template") if source is not None else None
        return cls(backend, template, str(folder.resolve()))

    @classmethod
    def bytes_only(cls) -> Tokenizer:
        """A tokenizer without a model: token i is byte i, a chat is "role: content" lines. For fake engines."""
        vocab = dict(BYTE_OF_CHAR)
        backend = RustTokenizer(BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = ByteLevelSplit(add_prefix_space=False, use_regex=False)
        backend.decoder = ByteLevelDecoder()
        return cls(backend, ChatTemplate(_PLAIN_TEMPLATE, {}))

    @property
    def has_chat_template(self) -> bool:
        """True when chats can be rendered."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens (such as BOS) unless told otherwise.

        With `max_tokens`, a text that is certainly longer is refused after encoding only as much of it as is needed to
        know, so a prompt of any size costs no more than one that fits.

        Raises:
            PromptOverContext: the text has more than `max_tokens` tokens.
        """
        if max_tokens is not None:
            self._refuse_oversized(text, max_tokens)
        ids = self._encode(text, add_special_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptOverContext(len(ids), max_tokens)
        return ids

    def encode_chat(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a chat with the generation prompt appended.

        Raises:
            InvalidRequest: the model has no chat template, the template refuses the chat, or the chat is too long.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot serve chats; use /v1/completions instead.", "messages"
            )
        return self.encode(self._template.render(messages), add_special_tokens=False, max_tokens=max_tokens)

    def decode(self, ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids in one go; equals the joined deltas of a Detokenizer."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one choice."""
        return self._pieces.detokenizer(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens as their name; empty for an id outside the vocabulary."""
        return self._pieces.token_bytes(token_id)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call releases the interpreter lock, encode() does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _refuse_oversized(self, text: str, max_tokens: int) -> None:
        """Encode ever longer prefixes until one alone is past the limit. Text after a cut can change a few of the last
        tokens, never many: hence the slack."""
        size = 4 * max_tokens + 4096
        slack = _PREFIX_SLACK_TOKENS + max_tokens // 16
        while 2 * size < len(text):
            num_tokens = len(self._encode(text[:size], False))
            if num_tokens > max_tokens + slack:
                raise PromptOverContext(num_tokens - slack, max_tokens, is_lower_bound=True)
            size *= 4


class PromptOverContext(InvalidRequest):
    """The prompt alone does not fit. `num_tokens` is its length, or a lower bound of it."""

    def __init__(self, num_tokens: int, max_tokens: int, is_lower_bound: bool = False) -> None:
        self.num_tokens, self.max_tokens, self.is_lower_bound = num_tokens, max_tokens, is_lower_bound
        about = "at least " if is_lower_bound else ""
        super().__init__(f"The prompt has {about}{num_tokens} tokens; at most {max_tokens} fit.", "prompt")


def _num_prefix(with_special: list[int], without: list[int]) -> int:
    """How many ids encode() puts before those of the text."""
    starts = range(len(with_special) - len(without) + 1)
    return next((at for at in starts if with_special[at : at + len(without)] == without), 0)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object.")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that templates may use: bos_token, eos_token, ..."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if not key.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[key] = content
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: its own file first, then the `chat_template` of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
