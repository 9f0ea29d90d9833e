"""`make tiny-hybrid`: trains the tiny hybrid model from a seed and imports it into PRFAAS_HOME/models, once.

First the MLA layer learns to look keys up in a table, without recurrent state so that it does not lean on it. Then
names come in, and the residual stream below the MLA layer is trained to show the key that a name is bound to. Tables
and texts grow as soon as a stage is learned. Embeddings and output weights are one matrix while training.
One thread: the same seed gives the same weights bit for bit with the same torch on the same kind of processor.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import KimiLinearForCausalLM

from benchmarks.cluster import prfaas_home
from benchmarks.tiny_hybrid import task
from benchmarks.tiny_hybrid.kda import fast_kda
from benchmarks.tiny_hybrid.model import new_model, save_tokenizer
from benchmarks.tiny_hybrid.muon import Muon
from common.engine.importer import import_model
from common.engine.manifest import MANIFEST

NAME = "tiny-hybrid"
SEED = 1
NUM_KEY_QUESTIONS = 24
FIRST_KEY = task.WORD_IDS[task.KEYS[0]]
WARMUP_STEPS, LOOK_BACK = 30, 20


@dataclass(frozen=True, slots=True)
class Stage:
    """At most `num_steps` batches of `num_texts` texts; over as soon as the mean loss of 20 steps is below `until`."""

    num_steps: int
    num_texts: int
    shape: task.Shape
    until: float = 0.0
    forgets: bool = False  # train without recurrent state


CURRICULUM = (
    Stage(400, 32, task.Shape(8, 4, 0, 0, num_symbols=16, num_names=0), until=0.15, forgets=True),
    Stage(300, 16, task.Shape(32, 16, 0, 0, num_symbols=32, num_names=0), until=0.15, forgets=True),
    Stage(300, 8, task.Shape(96, 48, 0, 0, num_symbols=64, num_names=0), until=0.15, forgets=True),
    Stage(400, 8, task.Shape(120, 32, 0, 20, num_symbols=64), until=0.3),
    Stage(400, 8, task.shape_for(256), until=0.2),
    Stage(200, 6, task.shape_for(512), until=0.1),
    Stage(100, 4, task.shape_for(1024)),
)


class Batch(NamedTuple):
    """Token ids [texts, words] and, per text, positions: before each value of a key question, before each word of the
    answer, of each name that asks; and the key it is bound to, counted from the first key.
    """

    ids: Tensor
    key_at: Tensor
    answer_at: Tensor
    name_at: Tensor
    bound: Tensor


class Losses(NamedTuple):
    """Mean cross-entropy of key questions, of answers about names, and of the bound keys below the MLA layer."""

    keys: float
    answers: float
    bound: float


def make_batch(rng: random.Random, num_texts: int, shape: task.Shape) -> Batch:
    """Texts, each followed by key questions with their values and, where it has names, a whole question and answer."""
    rows = [_row(rng, shape) for _ in range(num_texts)]
    return Batch(*(torch.tensor(column, dtype=torch.long) for column in zip(*rows, strict=True)))


def _row(rng: random.Random, shape: task.Shape) -> tuple[list[int], ...]:
    text = task.make_text(rng, shape)
    words = [*text.words, task.ASK_KEYS]
    key_at = [len(words) + 2 * n for n in range(NUM_KEY_QUESTIONS)]
    for key in rng.choices(list(text.table), k=NUM_KEY_QUESTIONS):
        words += [key, text.table[key][0]]
    if not shape.num_names:
        return task.ids_of(words), key_at, [], [], []
    first = rng.randrange(task.NUM_NAMES)
    start = len(words) + 1
    words += [task.ASK_NAMES, task.NAMES[first], *text.answer(first)]
    name_at = list(range(start, len(words) - 1, 2))
    bound = [int(text.bindings[task.NAMES.index(words[at])].key[1:]) for at in name_at]
    return task.ids_of(words), key_at, list(range(start, len(words) - 1)), name_at, bound


def losses(model: KimiLinearForCausalLM, batch: Batch) -> list[Tensor]:
    """The terms of Losses; those about names only when the batch has any."""
    found = model.model(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
    rows = torch.arange(len(batch.ids)).unsqueeze(1)
    terms = []
    for at in (batch.key_at, batch.answer_at)[: 1 + bool(batch.name_at.numel())]:
        logits = model.lm_head(found.last_hidden_state[rows, at])
        terms.append(functional.cross_entropy(logits.flatten(0, 1), batch.ids[rows, at + 1].flatten()))
    if batch.name_at.numel():
        below = found.hidden_states[model.config.layer_types.index("full_attention")][rows, batch.name_at]
        keys = model.model.embed_tokens.weight[FIRST_KEY : FIRST_KEY + task.NUM_KEYS]
        logits = functional.rms_norm(below, below.shape[-1:]) @ functional.normalize(keys, dim=-1).T
        terms.append(functional.cross_entropy(logits.flatten(0, 1), batch.bound.flatten()))
    return terms


def train(
    model: KimiLinearForCausalLM, seed: int, curriculum: Sequence[Stage] = CURRICULUM
) -> Iterator[tuple[Stage, Losses]]:
    """Train in place; yields after every step."""
    rng = random.Random(seed)
    model.lm_head.weight = model.model.embed_tokens.weight
    optimizer = Muon(model.train())
    num_steps = 0
    for stage in curriculum:
        recent: list[float] = []
        for n in range(stage.num_steps):
            # The last stage ends at a rate of nearly nothing.
            rate = 1 - n / stage.num_steps if stage is curriculum[-1] else 1.0
            with fast_kda(forgets=stage.forgets):
                terms = losses(model, make_batch(rng, stage.num_texts, stage.shape))
                sum(terms[1:], terms[0]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            num_steps += 1
            optimizer.step(rate * min(1.0, num_steps / WARMUP_STEPS))
            values = [term.item() for term in terms]
            yield stage, Losses(*values, *[0.0] * (3 - len(values)))
            recent = [*recent[-LOOK_BACK + 1 :], max(values[:2])]
            if len(recent) == LOOK_BACK and sum(recent) / LOOK_BACK < stage.until:
                break
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.eval()


def save_model(model: KimiLinearForCausalLM, folder: Path) -> None:
    """Write a Hugging Face directory."""
    model.save_pretrained(folder)
    save_tokenizer(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny_hybrid.train", description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, default=prfaas_home() / "models" / NAME)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    if (args.dest / MANIFEST).exists():
        _say(f"{args.dest} is there already")
        return 0
    torch.set_num_threads(1)
    model = new_model(args.seed)
    _say(f"training {NAME} from seed {args.seed}: about 15 minutes of one core")
    _watch(train(model, args.seed))
    with tempfile.TemporaryDirectory(prefix="tiny-hybrid-") as work:
        save_model(model, Path(work) / NAME)
        manifest = import_model(Path(work) / NAME, args.dest, name=NAME)
    num_parameters = sum(p.numel() for p in model.parameters())
    _say(f"{args.dest}: {num_parameters:,} parameters, weights {manifest.weights_digest[:16]}")
    return 0


def _watch(steps: Iterator[tuple[Stage, Losses]], every: int = 50) -> None:
    """Run the training and print how it goes, in CPU seconds of this process."""
    started = time.process_time()
    for n, (stage, loss) in enumerate(steps, 1):
        if n % every == 0:
            what = "keys {:.3f}  names {:.3f}  bound {:.3f}".format(*loss)
            _say(f"step {n:5d}  {stage.shape.num_words:5d} words  loss: {what}  {time.process_time() - started:6.1f} s")
    _say(f"trained in {time.process_time() - started:.0f} s of CPU")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
