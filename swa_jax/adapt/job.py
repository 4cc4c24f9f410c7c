"""What `swa-jax adapt` is asked to do, checked before anything is done."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

import jax

from swa_jax.adapt.replies import FILE as REPLIES
from swa_jax.adapt.replies import REPLY_TOKENS, Replies, find_replies
from swa_jax.adapt.search import EFFORTS, Effort, Space, Unit, find_space
from swa_jax.adapt.tasks import Data, Splits, draw_tasks
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import check_local, check_room
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import check_tokenizer
from swa_jax.checkpoint.named import BUNDLED, model_folder
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.checkpoint.servers import runs_single_heads
from swa_jax.data.batches import check_source, make_batches
from swa_jax.data.chat import find_wrap
from swa_jax.data.sources import RECORDS, SourceConfig
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.model.config import ModelConfig
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.task import refuse_nope
from swa_jax.train.config import StageConfig, TrainConfig
from swa_jax.train.objectives import Distill
from swa_jax.train.optimizer import OptimizerConfig

STAGES = ("original", "search", "tune", "adapted", "efficiency", "export", "canary")
FOLDER = "adapt"  # in OUT: the stages' results
MARK = ".swa-jax-adapt"  # in that folder: says that OUT is an adaptation's, to be written anew
LONGEST = 2048  # tokens of an example, unless --length says otherwise
WINDOW_SHARES = (32, 16, 8, 4)  # windows tried, as shares of an example's length


@dataclasses.dataclass(frozen=True)
class AdaptOptions:
    """The options of the command; None is what was not given."""

    model: str
    out: Path
    kv_budget: float = 0.3
    server: str | None = None
    data: Path | None = None
    text: tuple[Path, ...] = ()
    chat: bool | None = None
    length: int | None = None
    serve_length: int | None = None
    batched_tokens: int | None = None
    device: str | None = None
    window: tuple[int, ...] = ()
    unit: Unit = "layers"
    effort: str = "normal"
    examples: int | None = None
    choose_by: int | None = None
    tune: int = 0
    tune_data: tuple[str, ...] = ()
    tune_prompts: Path | None = None
    reply_tokens: int | None = None
    new_tokens: int = 32
    repeats: int = 5
    canary: bool = True
    batch_size: int = 8
    dtype: str | None = None
    seed: int = 0
    force: bool = False  # search also by tasks that tell nothing


def command_line(settings: AdaptOptions) -> str:
    """The command that has these settings, without what is as if it were not given."""
    words = ["swa-jax", "adapt", settings.model, str(settings.out)]
    for field in dataclasses.fields(settings)[2:]:
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        option = "--for" if field.name == "server" else "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-"))
            continue
        if field.name == "window":
            value = ",".join(map(str, value))
        for one in value if isinstance(value, tuple) else (value,):
            words += [option, f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


@dataclasses.dataclass(frozen=True)
class OriginalModel:
    """The model to adapt.

    Attributes:
      name: as the user gave it.
      folder: its checkpoint folder.
      bundled: the name of the bundled model that it is; None for any other.
      pattern: its own, with which it was trained.
      weight_bytes: what its weights take on the disk.
    """

    name: str
    folder: Path
    bundled: str | None
    hf_config: dict[str, Any]
    config: ModelConfig
    pattern: AttentionPattern
    weight_bytes: int


def find_source(name: str) -> OriginalModel:
    """Open what a user named in any of the ways of `checkpoint.named`, whose errors it has."""
    checkpoint = open_checkpoint(model_folder(name))
    size = sum(file.stat().st_size for file in checkpoint.folder.glob("weights/*"))
    bundled = name if name in BUNDLED and not Path(name).exists() else None
    return OriginalModel(
        name, checkpoint.folder, bundled, checkpoint.hf_config, checkpoint.config, checkpoint.pattern, size
    )


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """A request that can be carried out: everything that could be wrong with it has been looked at."""

    settings: AdaptOptions
    source: OriginalModel
    tokenizer: Tokenizer
    data: Data
    tasks: Splits
    memory: Memory
    space: Space
    dtype: str
    effort: Effort
    replies: Replies | None = None  # that the original model gives, to be trained on

    @property
    def folder(self) -> Path:
        """Of the stages' results."""
        return self.settings.out / FOLDER

    @property
    def export_folder(self) -> Path | None:
        return None if self.settings.server is None else self.settings.out / self.settings.server

    @property
    def replies_file(self) -> Path:
        return self.folder / REPLIES

    @property
    def length(self) -> int:
        """Tokens of an example."""
        return self.data.length

    @property
    def half_made(self) -> list[Path]:
        """Folders in OUT that a killed run was writing."""
        return sorted(path for path in self.settings.out.glob("*.partial") if path.is_dir())

    @property
    def written_bytes(self) -> int:
        """What the run leaves on the disk: the fine-tuned model with its checkpoints, the export."""
        copies = int(self.settings.server is not None)
        copies += 3 * int(self.settings.tune > 0)  # f32 of what may be bf16, and adapters with their moments
        return copies * self.source.weight_bytes + 2**20  # and the results


def prepare(settings: AdaptOptions) -> Adaptation:
    """Look at everything that can be wrong; nothing is written.

    Raises:
      ConfigError: in one sentence, what cannot be done and what could be.
    """
    if not 0 < settings.kv_budget <= 1:
        raise ConfigError(
            f"--kv-budget is {settings.kv_budget:g}: give the share of full attention's cache, above 0 and at most 1"
        )
    if settings.unit == "heads" and not runs_single_heads(settings.server):
        raise ConfigError(
            f"--unit heads keeps single KV heads full, which {settings.server} cannot run: take --for vllm-plugin, "
            "leave out --for, or choose layers"
        )
    _check_folder(settings.out)
    _check_files(settings)
    _check_windows(settings.window, settings.length or LONGEST)
    source = find_source(settings.model)
    source.config.refuse_linear("adapt")
    refuse_nope(source.pattern)
    tokenizer = load_tokenizer(source.folder).within(source.config.vocab_size)
    length = settings.length or min(LONGEST, source.config.max_position_embeddings)
    served = settings.serve_length or length
    counted = (settings.server, settings.batched_tokens, settings.device)
    memory = Memory(source.config, source.hf_config, served, *counted)
    if settings.server is not None:
        check_tokenizer(settings.server, source.folder, source.config.vocab_size)
    windows = settings.window or _windows(source, length)
    _check_windows(windows, length)
    space = find_space(memory, settings.kv_budget, windows, settings.unit)
    own = settings.data or settings.text
    chains = source.bundled == "chains" and not own
    wrap = None if chains else find_wrap(source.folder, settings.chat)
    data = Data(length, settings.data, settings.text, settings.seed, chains, wrap)
    effort = EFFORTS[settings.effort]
    choose_by, examples = settings.choose_by or effort.choose_by, settings.examples or effort.examples
    effort = effort._replace(choose_by=choose_by, examples=examples, rank_by=min(effort.rank_by, choose_by))
    tasks = draw_tasks(data, tokenizer, choose_by, examples)
    dtype = settings.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    job = _with_training_data(Adaptation(settings, source, tokenizer, data, tasks, memory, space, dtype, effort))
    # What an earlier run wrote there is written over or found again.
    if not job.folder.exists():
        check_room(settings.out, job.written_bytes)
    return job


def _with_training_data(job: Adaptation) -> Adaptation:
    """The job with the replies that it trains on, if it does; other data is looked at."""
    settings = job.settings
    if settings.tune_prompts is not None:
        replies = find_replies(
            settings.tune_prompts,
            job.source.folder,
            job.tokenizer,
            job.source.config,
            max_new_tokens=settings.reply_tokens or REPLY_TOKENS,
            length=job.length,
            seed=settings.seed,
        )
        return dataclasses.replace(job, replies=replies)
    if settings.tune:
        (stage,) = tuning(job, Path("pattern.json")).stages
        for one in stage.data:
            check_source(one)
        batches = make_batches(
            stage.data, job.tokenizer, length=job.length, batch_size=settings.batch_size, seed=settings.seed
        )
        batches.check()
    return job


def _windows(source: OriginalModel, length: int) -> tuple[int, ...]:
    """Those that are tried where none is named: shares of an example, and the one that the model was trained with."""
    own = source.pattern.sliding_window
    shares = [max(1, length // share) for share in WINDOW_SHARES]
    return tuple(sorted({*shares, *([own] if own is not None and own < length else [])}))


def _check_windows(windows: tuple[int, ...], length: int) -> None:
    if windows and min(windows) >= length:
        raise ConfigError(
            f"a window of {min(windows)} holds whole examples of {length} tokens, which is full attention: take a "
            "smaller --window, or a greater --length"
        )


def _check_files(settings: AdaptOptions) -> None:
    """What the user's own files are for, and that they are there."""
    files = {"--data": settings.data, "--text": settings.text, "--tune-prompts": settings.tune_prompts}
    for option, given in files.items():
        for file in given if isinstance(given, tuple) else filter(None, [given]):
            if not file.exists():
                raise ConfigError(f"{option} {file} does not exist: name a file that does")
    for option, idle in {"--tune-data": settings.tune_data, "--tune-prompts": settings.tune_prompts}.items():
        if idle and not settings.tune:
            raise ConfigError(f"{option} is trained on by --tune STEPS: give both")
    measured = {file.resolve() for file in [*settings.text, *filter(None, [settings.data])]}
    if both := [name for name in settings.tune_data if Path(name).resolve() in measured]:
        raise ConfigError(
            f"{both[0]} is both trained on (--tune-data) and measured on (--text, --data): name another for one of them"
        )
    if settings.reply_tokens is not None and settings.tune_prompts is None:
        raise ConfigError("--reply-tokens is the length of replies to --tune-prompts: give both")
    if settings.tune_prompts is not None and settings.tune_data:
        raise ConfigError(
            "--tune-prompts is learned by the original's probabilities, which --tune-data does not have: give one of "
            "them"
        )


def _check_folder(out: Path) -> None:
    check_local(out, "OUT")
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"OUT {out} cannot be written: {there} is no folder that you may write to")
    ours = (out / FOLDER / MARK).is_file()
    if out.exists() and not ours and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} holds something else: name a new folder, or that of an adaptation to go on with")


def tuning(job: Adaptation, pattern: Path) -> TrainConfig:
    """The fine-tuning by LoRA, in SWAA's setting: adapters of q, k and v under the pattern, merged at the end."""
    settings = job.settings
    data: tuple[SourceConfig, ...]
    if job.replies is not None:
        data = (SourceConfig(kind="distilled", files=(str(job.replies_file),)),)
    elif settings.tune_data:
        kinds = {name: "prompts" if Path(name).suffix in RECORDS else "text" for name in settings.tune_data}
        data = tuple(SourceConfig(kind=kind, files=(name,)) for name, kind in kinds.items())  # type: ignore[arg-type]
    elif job.source.bundled == "chains":
        data = (SourceConfig(kind="chains", hops=3, num_chains=4, num_questions=32), SourceConfig(kind="text"))
    elif job.source.bundled:
        data = (SourceConfig(kind="needles"), SourceConfig(kind="text"))
    else:
        raise ConfigError(
            "--tune needs --tune-data FILE (texts, or JSONL with the fields prompt and answer) or --tune-prompts FILE"
        )
    stage = StageConfig(steps=settings.tune, sequence_length=job.length, batch_size=settings.batch_size, data=data)
    return TrainConfig(
        output=str(settings.out / "tuned"),
        tokenizer=str(job.source.folder),
        init_from=str(job.source.folder),
        stages=(stage,),
        pattern=str(pattern),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=min(10, settings.tune // 10)),
        seed=settings.seed,
        bfloat16=job.dtype == "bfloat16",
        checkpoint_every=50,
        distill=None if job.replies is None else Distill(top_k=job.replies.drawing.top_logprobs),
    )
