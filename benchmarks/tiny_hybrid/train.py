"""`make tiny-hybrid`: trains the tiny hybrid model from a seed and imports it into PRFAAS_HOME/models, once.

First the MLA layer learns to look keys up in a table, without recurrent state so that it does not lean on it; then the
KDA layers to show in the residual stream which key a name is bound to; then both answer together. Texts grow as soon as
a stage is learned. Embeddings and output weights are one matrix while training.
One thread: the same seed gives the same weights bit for bit with the same torch on the same kind of processor.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import KimiLinearForCausalLM

from benchmarks.cli import make_parser
from benchmarks.cluster import prfaas_home
from benchmarks.tiny_hybrid import task
from benchmarks.tiny_hybrid.kda import fast_kda
from benchmarks.tiny_hybrid.model import new_model, save_tokenizer
from benchmarks.tiny_hybrid.muon import Muon
from common.engine.importer import import_model
from common.engine.manifest import MANIFEST

NAME = "tiny-hybrid"
SEED = 1
NUM_KEY_QUESTIONS = 16
FIRST_KEY = task.WORD_IDS[task.KEYS[0]]
WARMUP_STEPS, LOOK_BACK = 30, 20
MAX_SKIPPED = 5  # steps in a row
MAX_LOSS = 1.0  # of answers in the last steps; a model that learned the task is far below
SETTLING_STAGES = 2  # at the end: the learning rate falls to nothing over them


class Diverged(RuntimeError):
    """The training came to nothing; nothing is imported."""


@dataclass(frozen=True, slots=True)
class Stage:
    """At most `num_steps` batches of `num_texts` texts, shapes in turn; over when each loss is below `until` (mean
    of 20 steps). With `table`, the parts are trained apart: key questions on such texts, and bound keys on texts
    of `shapes`, if there are any.
    """

    num_steps: int
    num_texts: int
    shapes: tuple[task.Shape, ...]
    until: float = 0.0
    table: task.Shape | None = None


def _table(num_pairs: int, num_symbols: int) -> task.Shape:
    return task.Shape(2 * num_pairs, num_pairs, 0, 0, num_symbols, num_names=0)


CURRICULUM = (
    Stage(400, 32, (), 0.2, _table(4, 16)),
    Stage(300, 16, (), 0.2, _table(16, 32)),
    Stage(300, 8, (), 0.2, _table(48, 64)),
    Stage(400, 8, (task.Shape(96, 24, 8, 0, 32),), 0.2, _table(48, 64)),
    Stage(400, 8, (task.Shape(160, 32, 8, 48, 64),), 0.2),
    Stage(400, 8, (task.shape_for(256),), 0.2),
    Stage(300, 6, (task.shape_for(512), task.shape_for(256))),
    Stage(400, 4, (task.shape_for(1024), task.shape_for(256), task.shape_for(1536), task.shape_for(512))),
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
    """Mean cross-entropy of key questions, of the bound keys below the MLA layer, and of answers about names."""

    keys: float
    bound: float
    answers: float


def make_batch(rng: random.Random, num_texts: int, shape: task.Shape, num_key_questions: int) -> Batch:
    """Texts, each followed by key questions with their values and, where it has names, a whole question and answer."""
    rows = [_row(rng, shape, num_key_questions) for _ in range(num_texts)]
    return Batch(*(torch.tensor(column, dtype=torch.long) for column in zip(*rows, strict=True)))


def _row(rng: random.Random, shape: task.Shape, num_key_questions: int) -> tuple[list[int], ...]:
    text = task.make_text(rng, shape)
    words = [*text.words, task.ASK_KEYS]
    key_at = [len(words) + 2 * n for n in range(num_key_questions)]
    for key in rng.choices(list(text.table), k=num_key_questions):
        words += [key, text.table[key][0]]
    if not shape.num_names:
        return task.ids_of(words), key_at, [], [], []
    first = rng.randrange(task.NUM_NAMES)
    start = len(words) + 1
    words += [task.ASK_NAMES, task.NAMES[first], *text.answer(first)]
    name_at = list(range(start, len(words) - 1, 2))
    bound = [int(text.bindings[task.NAMES.index(words[at])].key[1:]) for at in name_at]
    return task.ids_of(words), key_at, list(range(start, len(words) - 1)), name_at, bound


def _losses(model: KimiLinearForCausalLM, rng: random.Random, stage: Stage, step: int) -> list[Tensor]:
    """The terms of Losses that this step of a stage trains, in order."""
    shape = stage.shapes[step % len(stage.shapes)] if stage.shapes else None
    if stage.table is not None:
        table = make_batch(rng, stage.num_texts, stage.table, NUM_KEY_QUESTIONS)
        with fast_kda(forgets=True):
            keys = _word_loss(model, _forward(model, table)[-1], table.ids, table.key_at)
        if shape is None:
            return [keys]
        named = make_batch(rng, stage.num_texts, shape, 0)
        with fast_kda():
            return [keys, _bound_loss(model, _forward(model, named), named)]
    batch = make_batch(rng, stage.num_texts, shape, NUM_KEY_QUESTIONS)
    with fast_kda():
        states = _forward(model, batch)
    keys, answers = (_word_loss(model, states[-1], batch.ids, at) for at in (batch.key_at, batch.answer_at))
    return [keys, _bound_loss(model, states, batch), answers]


def _hold_memory(model: KimiLinearForCausalLM, is_held: bool) -> None:
    """Keep what addresses the recurrent state as it is: without the state it would only be moved by noise."""
    for name, parameter in model.model.layers.named_parameters():
        if model.config.layer_types[int(name.split(".")[0])] == "linear_attention":
            addresses = any(part in name for part in ("q_proj", "k_proj", "conv1d", "forget_gate", "b_proj"))
            parameter.requires_grad_(not (is_held and addresses and "g_b_proj" not in name))


def _forward(model: KimiLinearForCausalLM, batch: Batch) -> tuple[Tensor, ...]:
    """The residual stream below each layer, and last what the output weights see."""
    return model.model(input_ids=batch.ids, use_cache=False, output_hidden_states=True).hidden_states


def _word_loss(model: KimiLinearForCausalLM, states: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    rows = torch.arange(len(ids)).unsqueeze(1)
    return functional.cross_entropy(model.lm_head(states[rows, at]).flatten(0, 1), ids[rows, at + 1].flatten())


def _bound_loss(model: KimiLinearForCausalLM, states: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Of reading the key off the residual stream by its embedding, as the MLA layer finds it in a key question."""
    rows = torch.arange(len(batch.ids)).unsqueeze(1)
    below = states[model.config.layer_types.index("full_attention")][rows, batch.name_at]
    keys = model.model.embed_tokens.weight[FIRST_KEY : FIRST_KEY + task.NUM_KEYS]
    logits = functional.rms_norm(below, below.shape[-1:]) @ functional.normalize(keys, dim=-1).T
    return functional.cross_entropy(logits.flatten(0, 1), batch.bound.flatten())


def train(
    model: KimiLinearForCausalLM, seed: int, curriculum: Sequence[Stage] = CURRICULUM
) -> Iterator[tuple[Stage, Losses]]:
    """Train in place; yields after every step. A step whose gradient is not finite changes nothing.

    Raises:
        Diverged: more than MAX_SKIPPED such steps in a row.
    """
    rng = random.Random(seed)
    model.lm_head.weight = model.model.embed_tokens.weight
    optimizer = Muon(model.train())
    num_skipped = 0
    num_steps, num_settling, num_left = 0, *[sum(s.num_steps for s in curriculum[-SETTLING_STAGES:])] * 2
    for at, stage in enumerate(curriculum):
        recent: list[list[float]] = []
        _hold_memory(model, not stage.shapes)
        for step in range(stage.num_steps):
            terms = _losses(model, rng, stage, step)
            sum(terms[1:], terms[0]).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            num_steps += 1
            num_skipped = 0 if norm.isfinite() else num_skipped + 1
            if num_skipped > MAX_SKIPPED:
                raise Diverged(f"the gradients of steps {num_steps - MAX_SKIPPED} to {num_steps} are not finite")
            if num_skipped:
                model.zero_grad()
            optimizer.step(num_left / num_settling * min(1.0, num_steps / WARMUP_STEPS))
            num_left -= at >= len(curriculum) - SETTLING_STAGES
            values = [term.item() for term in terms]
            yield stage, Losses(*values, *[0.0] * (3 - len(values)))
            recent = [*recent[-LOOK_BACK + 1 :], values]
            if len(recent) == LOOK_BACK and all(
                sum(term) < stage.until * LOOK_BACK for term in zip(*recent, strict=True)
            ):
                break
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.eval()


def save_model(model: KimiLinearForCausalLM, folder: Path) -> None:
    """Write a Hugging Face directory."""
    model.save_pretrained(folder)
    save_tokenizer(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = make_parser("make tiny-hybrid ARGS='...'", __doc__)
    parser.add_argument("--dest", type=Path, default=prfaas_home() / "models" / NAME, help="model directory to make")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and data")
    args = parser.parse_args(argv)
    if (args.dest / MANIFEST).exists():
        _say(f"{args.dest} is there already")
        return 0
    os.environ.setdefault("TQDM_DISABLE", "1")  # our own progress lines are enough
    torch.set_num_threads(1)
    model = new_model(args.seed)
    _say(f"training {NAME} from seed {args.seed}: about 15 minutes of one core")
    try:
        _watch(train(model, args.seed))
    except Diverged as error:
        _say(f"training failed, nothing is imported: {error}; another --seed may do")
        return 1
    with tempfile.TemporaryDirectory(prefix="tiny-hybrid-") as work:
        save_model(model, Path(work) / NAME)
        manifest = import_model(Path(work) / NAME, args.dest, name=NAME)
    num_parameters = sum(p.numel() for p in model.parameters())
    _say(f"{args.dest}: {num_parameters:,} parameters, weights {manifest.weights_digest[:16]}")
    return 0


def _watch(steps: Iterator[tuple[Stage, Losses]], every: int = 50) -> None:
    """Run the training and print how it goes, in CPU seconds of this process.

    Raises:
        Diverged: the model did not learn to answer.
    """
    started, recent = time.process_time(), deque[float](maxlen=LOOK_BACK)
    for n, (stage, loss) in enumerate(steps, 1):
        recent.append(loss.answers)
        if n % every == 0:
            words = max(shape.num_words for shape in (*stage.shapes, stage.table) if shape)
            what = "keys {:.3f}  bound {:.3f}  answers {:.3f}".format(*loss)
            _say(f"step {n:5d}  {words:5d} words  loss: {what}  {time.process_time() - started:6.1f} s")
    last = sum(recent) / len(recent)
    _say(f"trained in {time.process_time() - started:.0f} s of CPU, last loss of answers {last:.3f}")
    if not last <= MAX_LOSS:
        raise Diverged(f"the last loss of answers is {last:.3f}, more than {MAX_LOSS}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
