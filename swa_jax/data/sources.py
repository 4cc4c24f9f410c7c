"""What a source of training data is in a configuration, and the files it stands for."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import check_local
from swa_jax.data.haystack import library_files

STANDARD_LIBRARY = "stdlib"  # as a file name: the interpreter's own library sources, less those held out for evaluation
PLAIN_TEXT = (".txt", ".md", ".py")  # a file is one document
RECORDS = (".jsonl", ".parquet", ".array_record")  # files of many records with named fields
MANIFEST = "manifest.json"  # of a folder of tokens

Kind = Literal[
    "text", "tokens", "prompts", "distilled", "huggingface", "needles", "dictionary", "repeats", "chains", "passages"
]
ANSWERED = ("prompts", "distilled")  # only the answer is learned
GENERATED = ("needles", "dictionary", "repeats", "chains", "passages")  # swa_jax.data.lessons and .chains


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture.

    Kinds: `text` (documents), `tokens` (documents that `swa-jax data tokenize` made), `prompts` (records with a prompt
    and an answer; only the answer is learned), `distilled` (the same as tokens, as `swa-jax distill` writes it),
    `huggingface` (data sets saved by the `datasets` library, on a local disk), and the generated lessons of
    `swa_jax.data.lessons` and `swa_jax.data.chains`.

    `held_out` is a share of the documents, by a hash of each one's tokens: equal documents fall on the same side, and
    text read directly on the same side as when it was tokenised ahead.
    """

    kind: Kind = "text"
    files: tuple[str, ...] = (STANDARD_LIBRARY,)  # files, folders or globs; see `source_files`
    weight: float = 1.0  # share of the samples, relative to the other sources
    text_field: str = "text"  # text and huggingface: the field of a record that has the document
    prompt_field: str = "prompt"  # prompts
    answer_field: str = "answer"  # prompts
    split: str = "train"  # huggingface
    held_out: float = 0.0  # share of the documents that training never reads
    num_keys: int = 1  # needles
    num_questions: int = 1  # needles and chains
    num_chains: int = 1  # chains
    hops: int = 1  # chains: statements from the name that is asked for to its number
    sums: float = 0.0  # chains: the share of questions that ask for the sum of two numbers
    noise: Literal["words", "text"] = "words"  # chains: filler words, or text of `files`, between the statements

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"a source's 'weight' must be above 0, got {self.weight}: leave the source out")
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"a source's 'held_out' must be a share from 0 to below 1, got {self.held_out}")
        if self.held_out and self.kind in GENERATED:
            raise ConfigError(f"a source of kind '{self.kind}' has no documents to hold out: leave out its 'held_out'")
        for file in self.files:
            check_local(file, "data files")
        if self.kind in ("tokens", "huggingface", *ANSWERED) and STANDARD_LIBRARY in self.files:
            raise ConfigError(f"a source of kind '{self.kind}' needs its 'files' named")


def source_files(source: SourceConfig) -> tuple[Path, ...]:
    """The files of a source, in a fixed order, or the folders if its kind has folders; nothing found is an error.

    Only records hold prompts, and only plain text is a haystack for needles, repeats and chains.
    """
    if source.kind in ("dictionary", "passages") or (source.kind == "chains" and source.noise == "words"):
        return ()
    if not source.files:
        raise ConfigError(f"a source of kind '{source.kind}' needs its 'files' named")
    if source.kind in ("tokens", "huggingface"):
        return tuple(_folder(name, source.kind) for name in source.files)
    suffixes = {"text": PLAIN_TEXT + RECORDS, "prompts": RECORDS, "distilled": (".jsonl",)}.get(source.kind, PLAIN_TEXT)
    return text_files(source.files, suffixes)


def text_files(names: Sequence[str], suffixes: Sequence[str] = PLAIN_TEXT + RECORDS) -> tuple[Path, ...]:
    """The files that names, folders and globs stand for, in a fixed order; nothing found is an error.

    Of a folder, and of folders that are linked into it, those with one of the suffixes are taken, hidden ones left out;
    a file that is named is taken whatever its suffix. Files of no bytes are an error if they are named or should hold
    records; a folder of text may have some.
    """
    found: list[Path] = []
    for name in names:
        if name == STANDARD_LIBRARY:
            here = library_files(held_out=False)
        elif Path(name).is_file():  # its name may have what means something else in a glob
            here = [Path(name)]
        else:
            folder = Path(name).is_dir()
            paths = map(Path, glob.glob(f"{glob.escape(name)}/**" if folder else name, recursive=True))
            files = sorted((p for p in paths if not p.is_dir() and (p.suffix in suffixes or not folder)), reverse=True)
            here = sorted({p.resolve(): p for p in files}.values())  # links may lead to one file by several ways
        if not here:
            wanted = ", ".join(f"*{suffix}" for suffix in suffixes)
            raise ConfigError(f"data files '{name}': no such file, and no folder or glob with text in it ({wanted})")
        for file in here:
            if (file.suffix in RECORDS or str(file) == name) and file.stat().st_size == 0:
                raise ConfigError(f"data file {file} is empty: make it again, or leave it out")
        found += here
    return tuple(found)


def _folder(name: str, kind: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"data files '{name}': no such folder, which is what kind '{kind}' reads")
    return folder
