"""What is measured of a model that was trained: losses by length, answers to needles and chains, and routing."""

from collections.abc import Sequence

import numpy as np

from swa_jax.adapt.tasks import HOPS, RIVALS
from swa_jax.data.batches import open_source
from swa_jax.data.chains import STATEMENT, ChainWords
from swa_jax.data.haystack import Haystack, library_files
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate import needle_accuracy, needle_examples, perplexity
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.evaluate.routing import full_share
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.loop import TrainConfig

LENGTHS = (32, 256, 1024, 4096)  # a quarter of those of SWAT's Table 2
PIECES = 24  # of the greatest length, out of held-out documents
NEAR, FAR = (0.7, 0.9, 1.0), (0.02, 0.1, 0.2, 0.3, 0.4)  # depths of needles; windows reach back to about 0.5
PER_DEPTH = 8
WINDOW = 32  # of configs/compare/swiattn-chains.yaml
LENGTH = 384  # tokens of a prompt of chains with its answer
PER_HOPS = 48  # prompts of each number of hops
SEED = 1  # of the prompts; those of training are drawn otherwise


def losses_by_length(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Held-out loss at each length under the training window, and for "vanilla 256" under Table 2's other windows."""
    stage = config.stages[0]
    lengths = LENGTHS[:2] if tiny else LENGTHS
    longest = lengths[-1]
    held_out = open_source(stage.data[0], tokenizer, length=longest, seed=None, held_out=True).documents
    pieces = [
        document[start : start + longest + 1]
        for start in range(0, 4 * longest, longest)  # at most four of a document
        for document in held_out
        if len(document) > start + longest
    ][: 2 if tiny else PIECES]
    train_window = config.sliding_window or stage.sequence_length
    windows: list[int | None] = [train_window]
    if config.sliding_window is None and train_window == 256:
        windows += [32, None]
    values = {}
    for window in windows:
        recipe = "full" if window is None else "window"
        seeing = model.with_pattern(AttentionPattern.from_recipe(recipe, model.config, sliding_window=window))
        name = {train_window: "", None: ", sees all"}.get(window, f", sees {window}")
        values |= {f"{length}{name}": held_out_loss(seeing, pieces, length) for length in lengths}
    return values


def held_out_loss(model: Decoder, pieces: Sequence[Sequence[int]], length: int) -> float:
    """Mean loss in nats a token over the pieces, each cut into passes of `length`: the same tokens at every length."""
    size = len(pieces[0]) - 1
    passes = [perplexity(model, p, context=length, batch_size=max(1, size // length)) for p in pieces]
    return float(np.mean([one.token_nll.mean() for one in passes]))


def needles(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss of files that no training read, needles found by generation, and where full attention is taken."""
    depths = (0.02, 1.0) if tiny else FAR + NEAR
    examples = needle_examples(
        tokenizer,
        length=config.stages[0].sequence_length,
        num_examples=len(depths) * (1 if tiny else PER_DEPTH),
        depths=depths,
        haystack=Haystack(tokenizer, library_files(held_out=True)),
        seed=1,
    )
    found = needle_accuracy(model, tokenizer, examples, max_new_tokens=20, batch_size=8)
    answer_loss = score_answers(model, examples, batch_size=8).nll
    asked = [answer_queries([example]) for example in examples]
    answer_ratio = np.array([full_ratio(full_share(model, tokens), answers).mean() for tokens, answers in asked])
    at = np.arange(len(examples)) % len(depths)
    far = np.isin(at, [i for i, depth in enumerate(depths) if depth in FAR])
    return text_and_ratios(model, tokenizer, config, tiny) | {
        "needles found": float(found[far].mean()),
        "answer loss": float(answer_loss[far].mean()),
        "full ratio, far answers": float(answer_ratio[far].mean()),
        "full ratio, near answers": float(answer_ratio[at == len(depths) - 1].mean()),
        **{f"found at {depth}": float(found[at == i].mean()) for i, depth in enumerate(depths)},
    }


def chains(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss of files that no training read, answers by hops, and which tokens take full attention in which layer."""
    values = text_and_ratios(model, tokenizer, config, tiny)
    far, near, losses = [], [], []
    for hops in HOPS:
        count = 2 if tiny else PER_HOPS
        cell, close = ChainCell(hops, RIVALS, LENGTH), ChainCell(hops, RIVALS, LENGTH, depth=1.0)
        asked = chain_examples(tokenizer, cell, num_examples=count, gap=WINDOW, seed=SEED)
        scores = score_answers(model, asked, batch_size=8)
        values[f"right, {hops}"] = float(scores.right.mean())
        losses.append(scores.nll.mean())
        far += asked
        near += chain_examples(tokenizer, close, num_examples=count, seed=SEED)
    values["right"] = float(np.mean([values[f"right, {hops}"] for hops in HOPS]))
    values["answer loss"] = float(np.mean(losses))
    fillers = ChainWords.of(tokenizer).fillers
    for place, examples in (("far", far), ("near", near)):
        tokens, answers = answer_queries(examples)
        takes = full_share(model, tokens)
        numbers, hops_done = statement_ends(examples, tokens.shape)
        counted = {f"{place} hops": hops_done, f"{place} answers": answers}
        if place == "far":
            filler = np.isin(tokens, fillers).astype(float)
            counted |= {"prompts": np.ones(tokens.shape), "numbers": numbers, "filler": filler}
        for group, these in counted.items():
            ratio = full_ratio(takes, these)
            values[f"full ratio, {group}"] = float(ratio.mean())
            values |= {f"full ratio, {group}, layer {layer}": float(one) for layer, one in enumerate(ratio)}
    return values


def text_and_ratios(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss and full-attention ratios on the library's held-out files, in passes as long as the training's rows."""
    length = config.stages[0].sequence_length
    texts = [tokenizer.encode(f.read_text(errors="replace")) for f in library_files(held_out=True)]
    pieces = [t[: 8 * length + 1] for t in texts if len(t) > 8 * length][: 1 if tiny else None]
    ratio = full_ratio(full_share(model, np.array([piece[:length] for piece in pieces])))
    by_layer = {f"full ratio of layer {layer}": float(one) for layer, one in enumerate(ratio)}
    return {"text loss": held_out_loss(model, pieces, length), "full ratio": float(ratio.mean()), **by_layer}


def full_ratio(takes: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Share of the counted tokens [B, T] that take full attention, by layer [L], given takes [B, L, T]."""
    weight = np.ones((len(takes), takes.shape[2])) if counted is None else counted
    return (takes * weight[:, None]).sum((0, 2)) / weight.sum()


def answer_queries(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Examples of one length as tokens [B, T], and 1 at the queries that predict their answers [B, T]."""
    tokens = np.array([[*example.prompt, *example.answer] for example in examples])
    counted = np.zeros(tokens.shape)
    for row, example in zip(counted, examples, strict=True):
        row[len(example.prompt) - 1 : -1] = 1
    return tokens, counted


def statement_ends(examples: Sequence[Example], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """1 at the last tokens of the asked chain's statements [B, T]: of the one with a number, and of the others."""
    numbers, names = np.zeros(shape), np.zeros(shape)
    for row, example in enumerate(examples):
        first, *others = [start + STATEMENT - 1 for start in example.meta["statements"]]
        numbers[row, first] = 1
        names[row, others] = 1
    return numbers, names
