"""What `fuzz.py` does to a model folder: one function for each kind of damage.

Each takes the folder, a source of random numbers and a file outside the folder that nobody may read from, and returns
what it did, for the report.
"""

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Mutation = Callable[[Path, random.Random, Path], str]

NAN, INFINITY = float("nan"), float("inf")
INTEGERS = [-1, 0, 1, 2, 3, 7, 10**9, 10**30, -(10**30), 2**31, 2**63]
FLOATS = [1e308, -1e308, 1e-300, 1e-320, 0.5, -1.5, 1e9, NAN, INFINITY, -INFINITY]
TEXTS = ["", "x", "1", "1e-5", "nan", "silu", "\x00", "\ud800"]
LISTS = [[], [1], [None], ["x"], [[]], {}, {"a": 1}, {"rope_type": "yarn"}, [1] * 50, ["full_attention"] * 4]
VALUES: list[Any] = [None, True, False, *INTEGERS, *FLOATS, *TEXTS, *LISTS, ["sliding_attention"] * 3, [{}]]
KEYS = yaml.safe_load(Path(__file__).with_name("fuzz.yaml").read_text())
SHARD = "model-00001-of-00003.safetensors"


def a_value(rng: random.Random, old: Any = None) -> Any:
    if isinstance(old, int | float) and not isinstance(old, bool) and rng.random() < 0.4:
        return rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, old / 1000, float(old), str(old), old * 10**40])
    return copy.deepcopy(rng.choice(VALUES))


def change(data: Any, rng: random.Random, keys: list[str]) -> str:
    """Change a JSON object somewhere, or one inside it."""
    inner = [value for value in data.values() if isinstance(value, dict) and value]
    if inner and rng.random() < 0.4:
        return "inside: " + change(rng.choice(inner), rng, keys)
    key = rng.choice(list(data) if data and rng.random() < 0.6 else keys)
    if key in data and rng.random() < 0.15:
        del data[key]
        return f"without {key}"
    if isinstance(data.get(key), list) and data[key] and rng.random() < 0.6:
        place = rng.randrange(len(data[key]))
        data[key][place] = a_value(rng, data[key][place])
        return f"{key}[{place}] = {data[key][place]!r:.80}"
    data[key] = a_value(rng, data.get(key))
    return f"{key} = {data[key]!r:.80}"


def damage_text(text: str, rng: random.Random) -> tuple[bytes, str]:
    """A text of JSON that is none any more, or means two things."""
    kind = rng.choice(["cut", "twice", "deep", "digits", "byte", "utf-16", "bom", "list", "empty", "comma", "huge"])
    if kind == "cut":
        return text[: rng.randrange(len(text))].encode(errors="surrogatepass"), kind
    if kind == "twice":
        key = rng.choice(list(json.loads(text)) or ["a"])
        return (text.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice([1, 'x', None]))}}}").encode(), kind
    if kind == "byte":
        data = bytearray(text.encode())
        data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data), kind
    return {
        "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
        "utf-16": text.encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "list": b"[" + text.encode() + b"]",
        "empty": b"",
        "comma": text.replace(",", ",,", 1).encode(),
        "huge": text.replace("{", '{"rms_norm_eps": 1e999,', 1).encode(),
    }[kind], kind


def mutate_json(file: Path, rng: random.Random, keys: list[str]) -> str:
    text = file.read_text() if file.is_file() else "{}"
    if rng.random() < 0.2:
        data, what = damage_text(text, rng)
        file.write_bytes(data)
        return f"{file.name}: {what}"
    data = json.loads(text)
    done = [change(data, rng, keys) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    file.write_text(json.dumps(data))
    return f"{file.name}: {'; '.join(done)}"


def config(folder: Path, rng: random.Random, secret: Path) -> str:
    return mutate_json(folder / "config.json", rng, KEYS["config"])


def rope(folder: Path, rng: random.Random, secret: Path) -> str:
    """Rotary embeddings of every type with values that may be absurd."""
    file = folder / "config.json"
    hf = json.loads(file.read_text())
    settings: dict[str, Any] = {"rope_type": rng.choice(KEYS["rope_types"])}
    settings["factor"] = rng.choice([0.5, 1, 2.0, 8, a_value(rng, 4.0)])
    half = (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]) // 2
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    settings |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    for _ in range(rng.choice([0, 1, 1, 2])):
        key = rng.choice(KEYS["rope"])
        settings[key] = a_value(rng, settings.get(key))
    if rng.random() < 0.3:
        other = rng.choice([settings, {"rope_type": "default"}, 3])
        settings = {"full_attention": settings, "sliding_attention": other}
    hf[rng.choice(["rope_scaling", "rope_parameters"])] = settings
    if rng.random() < 0.5:
        hf["rope_theta"] = a_value(rng, hf.get("rope_theta"))
    file.write_text(json.dumps(hf))
    return f"rope: {settings!r:.300}, theta {hf.get('rope_theta')!r:.40}"


def companion(folder: Path, rng: random.Random, secret: Path) -> str:
    return mutate_json(
        folder / rng.choice(KEYS["companions"]), rng, [*KEYS["generation"], "eos_token", "model", "added_tokens"]
    )


def pattern(folder: Path, rng: random.Random, secret: Path) -> str:
    """A `pattern.json` beside the model, as our export writes it."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    kinds = ["full_attention", "sliding_attention", "head_hybrid_attention", "switch_attention"]
    data: dict[str, Any] = {"layer_types": [rng.choice(kinds) for _ in range(layers)], "sliding_window": 8}
    data |= {"num_sink_tokens": 1, "version": 1}
    file = folder / "pattern.json"
    file.write_text(json.dumps(data))
    return mutate_json(file, rng, [*data, "full_kv_heads", "full_attention_decode", "provenance"])


# ---- weights ----


def shard_of(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("model*.safetensors")))


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(file: Path, header: str, payload: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + payload)


def header(folder: Path, rng: random.Random, secret: Path) -> str:
    """The header of a safetensors file says something else than its payload."""
    file = shard_of(folder, rng)
    entries, payload = split(file)
    name = rng.choice([key for key in entries if key != "__metadata__"])
    kinds = ["value", "offset", "shape", "dtype", "rename", "twice", "copy", "drop", "swap", "metadata", "text"]
    kind = rng.choice(kinds)
    entry = entries[name]
    if kind == "value":
        entry[rng.choice([*entry, "x"])] = a_value(rng)
    elif kind == "offset":
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-8, -1, 1, 4, 10**6, 2**63])
    elif kind == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice([shape[::-1], [*shape, 1], [], [-1, -36], [0], [2**40, 2**40], [1.0]])
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I32", "U8", "F8_E4M3", "F4", "", "float32", None])
    elif kind == "rename":
        new = rng.choice([name.upper(), "", "../x", name + "\n", "\x00", "mtp.x", name + "_scale_inv"])
        entries[new] = entries.pop(name)
    elif kind == "copy":
        entries["copy"] = entry
    elif kind == "drop":
        del entries[name]
    elif kind == "swap":
        other = rng.choice([key for key in entries if key != "__metadata__"])
        entries[name], entries[other] = entries[other], entries[name]
    elif kind == "metadata":
        entries["__metadata__"] = a_value(rng)
    text = json.dumps(entries)
    if kind == "twice":
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
    elif kind == "text":
        damaged, what = damage_text(text, rng)
        text, kind = damaged.decode("latin-1"), f"text {what}"
    join(file, text, payload)
    return f"header of {file.name}: {kind} of {name}"


def payload(folder: Path, rng: random.Random, secret: Path) -> str:
    """Bytes of the weights: no numbers, flipped bits, too many or too few."""
    file = shard_of(folder, rng)
    data = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    kind = rng.choice(["nan", "bit", "cut", "more", "hole", "length", "empty", "pointer"])
    if kind == "nan":
        place = rng.randrange(start, len(data) - 4) // 4 * 4
        data[place : place + 4] = struct.pack("<I", rng.choice([0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000]))
    elif kind == "bit":
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "more":
        data += b"\0" * rng.choice([1, 8, 4096])
    elif kind == "hole":
        data[start:start] = b"\0" * rng.choice([1, 8])
    elif kind == "length":
        data[:8] = struct.pack("<Q", rng.choice([0, 1, 2, len(data), 2**40, 2**64 - 1, start + 1]))
    elif kind == "empty":
        data.clear()
    else:
        data[:] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    file.write_bytes(data)
    return f"payload of {file.name}: {kind}"


def index(folder: Path, rng: random.Random, secret: Path) -> str:
    """The index of the shards, or the shards themselves."""
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        names = [key for key in split(folder / "model.safetensors")[0] if key != "__metadata__"]
        file.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    data = json.loads(file.read_text())
    places = data["weight_map"]
    name = rng.choice(list(places))
    kind = rng.choice(["place", "value", "drop", "more", "text", "shard", "map", "again"])
    elsewhere = ["../secret.safetensors", str(secret), "", ".", "..", "model.safetensors", "a/b", "\x00", SHARD]
    elsewhere.append("x" * 300)
    if kind == "place":
        places[name] = rng.choice([*elsewhere, *VALUES])
    elif kind == "value":
        data["weight_map"] = rng.choice(VALUES)
    elif kind == "drop":
        del places[name]
    elif kind == "more":
        places["model.more.weight"] = rng.choice([*places.values()])
    elif kind == "map":
        data["weight_map"] = dict.fromkeys(places, rng.choice(elsewhere))
    elif kind in ("shard", "again"):
        shard = shard_of(folder, rng)
        other = folder / rng.choice(["model-9.safetensors", SHARD, "model.safetensors"])
        if kind == "shard":
            shutil.move(shard, other)
        else:
            other.write_bytes(shard.read_bytes())
            places[name] = other.name
    file.write_text(json.dumps(data))
    return mutate_json(file, rng, ["weight_map", "metadata"]) if kind == "text" else f"index: {kind} of {name}"


def links(folder: Path, rng: random.Random, secret: Path) -> str:
    """A file of the folder is a link, a folder, a pipe, or cannot be read."""
    file = folder / rng.choice([*KEYS["companions"], *KEYS["others"]])
    kind = rng.choice(["secret", "secret", "relative", "dangling", "loop", "folder", "pipe", "inside", "null", "etc"])
    kept = file.read_bytes() if file.is_file() else None
    if file.exists():
        file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "inside":
        (folder / "kept").write_bytes(kept or b"{}")
        file.symlink_to("kept")
    else:
        target = {"secret": str(secret), "relative": f"../{secret.name}", "dangling": "nowhere", "loop": file.name}
        file.symlink_to(target.get(kind, {"null": "/dev/null", "etc": "/etc/hostname"}.get(kind, "")))
    return f"{file.name} is a {kind}"


SOURCE: tuple[Mutation, ...] = (config, config, rope, companion, pattern, header, payload, index, links)
