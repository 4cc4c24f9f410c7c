"""Where models come from: the hub and buckets are read where they are; links do not lead out of a folder."""

import os
import shutil
from pathlib import Path

import fsspec
import huggingface_hub
import pytest
from fake_hub import COMMIT, REPOSITORY, in_cache, running_hub
from gguf_files import write_gguf
from golden_models import GOLDEN, files_of
from huggingface_hub import constants

import swa_jax
from swa_jax.base.errors import CheckpointError, ConfigError, UnreachableError
from swa_jax.checkpoint import folder as checkpoint_module
from swa_jax.checkpoint import safetensors_files, sources
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model

SHARDED = GOLDEN / "qwen3-full"  # three shards
READ = ("config.json", "generation_config.json", "model")  # beginnings of the names that an import needs


@pytest.fixture
def repository(tmp_path) -> Path:
    """The sharded golden, and beside it files that no import needs."""
    folder = shutil.copytree(SHARDED, tmp_path / "repository")
    (folder / "consolidated.safetensors").write_bytes(b"x" * 10_000_000)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1_000_000)
    return folder


def assert_as_from_folder(destination: Path, folder: Path = SHARDED) -> None:
    """All that an import of the folder writes, the note of where it came from excepted."""
    straight = import_model(folder, destination.with_name("straight"))
    one, other = ({**files_of(d), "manifest.json": b""} for d in (destination, straight))
    assert one == other
    swa_jax.load_model(destination)


# ---- the hub ----


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """A hub, and a cache of its own."""
    cache = tmp_path / "cache"
    with running_hub(repository) as running:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield running
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    "name", [REPOSITORY, f"hf://{REPOSITORY}", f"hf://{REPOSITORY}@main", f"{REPOSITORY}@{COMMIT}"]
)
def test_a_repository_is_read_where_it_is(hub, destination, tmp_path, name):
    import_model(name, destination)
    assert_as_from_folder(destination)
    assert not (tmp_path / "cache").exists() or not files_of(tmp_path / "cache")  # no second copy
    assert set(hub.sent) == {file.name for file in SHARDED.iterdir() if file.name.startswith(READ)}
    weights = {name: size for name, size in hub.sent.items() if name.endswith(".safetensors")}
    assert sum(weights.values()) < 1.2 * sum(file.stat().st_size for file in SHARDED.glob("model*.safetensors"))


def test_a_gguf_file_of_a_repository_is_read_where_it_is(hub, repository, destination, tmp_path):
    """Its parts too."""
    file = write_gguf(repository / "m.gguf", SHARDED)
    write_gguf(repository / "parts.gguf", SHARDED, split_tensors=20)
    straight = files_of(import_model(file, tmp_path / "straight"))
    for name in (f"{REPOSITORY}/m.gguf", f"hf://{REPOSITORY}@main/parts-00002-of-00003.gguf"):
        found = files_of(import_model(name, destination / Path(name).stem))
        for same in straight.keys() - {"manifest.json", "weights/model.safetensors"}:
            assert found[same] == straight[same], same
        swa_jax.load_model(destination / Path(name).stem)
    with pytest.raises(CheckpointError, match=r"someone/model/none.gguf is no file: give a GGUF file"):
        import_model(f"{REPOSITORY}/none.gguf", tmp_path / "none")


@pytest.mark.parametrize("lacks", [[], ["model-00002-of-00003.safetensors"]])
def test_what_is_in_the_cache_is_not_fetched_again(hub, destination, tmp_path, lacks):
    in_cache(tmp_path / "cache", SHARDED, leave_out="".join(lacks))
    import_model(REPOSITORY, destination)
    assert_as_from_folder(destination)
    assert list(hub.sent) == lacks


def test_without_the_hub_the_cache_serves(hub, destination, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match=r"the Hugging Face hub cannot be reached \(.*\); give a folder"):
        import_model(REPOSITORY, destination)
    in_cache(tmp_path / "cache", SHARDED)
    import_model(REPOSITORY, destination)
    assert_as_from_folder(destination)


def test_a_transfer_that_breaks_off_goes_on(hub, destination, monkeypatch):
    """What was whole is not fetched again."""
    monkeypatch.setattr(checkpoint_module, "SHARD_BYTES", 50_000)
    monkeypatch.setattr(safetensors_files, "PART_BYTES", 4000)
    hub.breaks_after = 150_000
    with pytest.raises(UnreachableError, match=r"cannot be read now \(.*\): start the same command again") as caught:
        import_model(REPOSITORY, destination)
    assert "\n" not in str(caught.value)
    assert any(destination.with_name("checkpoint.partial").rglob("*.safetensors"))
    hub.breaks_after = None
    hub.sent.clear()
    import_model(REPOSITORY, destination)
    total = sum(file.stat().st_size for file in SHARDED.glob("model*.safetensors"))
    assert sum(hub.sent.values()) < 0.8 * total
    assert_as_from_folder(destination)


def test_names_that_are_no_source(hub, tmp_path, destination):
    for name in ("someone/else", "hf://someone/else"):
        with pytest.raises(CheckpointError, match="'someone/else' is neither a folder here nor a model on the Hugging"):
            import_model(name, destination)
    for name in (tmp_path / "missing", "./missing", "missing", "a/b/c", "http://a/b", "hf://a", "file:///etc"):
        with pytest.raises(CheckpointError, match=r"is no folder; give a folder with config.json, a hub id"):
            import_model(name, destination)
    assert not destination.parent.exists()


# ---- buckets ----


@pytest.fixture
def bucket(monkeypatch):
    """A bucket that is in memory."""
    monkeypatch.setattr(sources, "SCHEMES", ("memory",))
    files = fsspec.filesystem("memory")
    files.put(str(SHARDED), "/bucket/model", recursive=True)
    yield "memory://bucket/model"
    files.rm("/bucket", recursive=True)


def test_a_bucket_is_read_where_it_is(bucket, destination):
    with pytest.raises(CheckpointError, match=r"memory://bucket/other does not exist"):
        import_model("memory://bucket/other", destination)
    assert not destination.parent.exists()
    import_model(bucket, destination)
    assert_as_from_folder(destination)


def test_named_chat_templates_come_along(bucket, destination, source, tmp_path):
    name = "additional_chat_templates/tool_use.jinja"
    (source / name).parent.mkdir()
    (source / name).write_text("with tools")
    fsspec.filesystem("memory").pipe(f"/bucket/model/{name}", b"with tools")
    for place in (source, bucket):
        imported = import_model(place, destination / Path(place).name)
        exported = export_model(imported, tmp_path / "exported" / Path(place).name, canary=False)
        assert (exported / name).read_text() == "with tools"
    (tmp_path / "secret").write_text("{}")
    (source / name).unlink()
    (source / name).symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        import_model(source, tmp_path / "another")


def test_a_bucket_needs_its_package(destination, monkeypatch):
    def missing(scheme):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ConfigError, match=r"reading gs:// needs the package gcsfs, which is not installed: run pip"):
        import_model("gs://bucket/model", destination)


# ---- links ----

COMPANION = "generation_config.json"


@pytest.mark.parametrize("name", [COMPANION, "config.json", "chat_template.jinja", "pattern.json"])
@pytest.mark.parametrize("kind", ["link", "relative", "above", "dangling", "folder", "pipe", "loop"])
def test_companions_are_regular_files_of_the_folder(source, destination, tmp_path, name, kind):
    (tmp_path / "secret").write_text("{}")
    file = source / name
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        secret = tmp_path / "secret"
        targets = {"link": secret, "relative": "../secret", "above": "..", "dangling": "none", "loop": name}
        file.symlink_to(targets[kind])
    with pytest.raises(CheckpointError, match=r"outside the model's folder|is no regular file|cannot be read"):
        import_model(source, destination)
    assert not destination.parent.exists()


def test_links_inside_the_folder_are_followed(source, destination, tmp_path):
    (source / COMPANION).rename(source / "kept")
    (source / COMPANION).symlink_to("kept")
    (tmp_path / "elsewhere").symlink_to(source)
    import_model(tmp_path / "elsewhere", destination)
    assert not (destination / COMPANION).is_symlink()
    assert_as_from_folder(destination, GOLDEN / "qwen2-full")


def test_a_store_of_blobs_is_the_hubs_own_only(source, destination, tmp_path):
    """A folder named as the cache's are does not open the folders beside it."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    shutil.copytree(source, snapshot)
    (tmp_path / "secret").write_text("{}")
    (snapshot / "merges.txt").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        import_model(snapshot, destination)
