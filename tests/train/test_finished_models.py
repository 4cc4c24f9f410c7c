"""What a finished model's `config.json` says beside the model."""

import json

from tiny_models import BYTES
from training_runs import text_in

from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.train.loop import TrainConfig, train


def test_the_ids_of_special_tokens_are_there_and_stay(tmp_path, byte_tokenizer):
    stages = [{"steps": 1, "sequence_length": 16, "batch_size": 4, "data": text_in(tmp_path)}]
    settings = {"tokenizer": str(byte_tokenizer), "stages": stages, "optimizer": {"schedule": "constant"}}

    def finished(name, **changes):
        folder = train(from_dict(TrainConfig, settings | {"output": str(tmp_path / name)} | changes), quiet=True)
        return folder, json.loads((folder / "config.json").read_text())

    first, said = finished("first", model=to_dict(BYTES))
    assert (said["eos_token_id"], said["bos_token_id"]) == (256, None)
    (first / "config.json").write_text(json.dumps(said | {"eos_token_id": [256, 10], "note": "mine"}))
    for changes in ({}, {"model_changes": {"max_position_embeddings": 4096}}):
        folder, said = finished(f"{len(changes)}-changes", init_from=str(first), **changes)
        assert (said["eos_token_id"], said["note"]) == ([256, 10], "mine")
    assert open_checkpoint(folder).config.max_position_embeddings == 4096
    # Our own family, which alone can say this, takes no other keys.
    folder, said = finished("without-rope", init_from=str(first), pattern="layers:1+nope", sliding_window=8)
    assert (said["model_type"], said["eos_token_id"]) == ("swat", [256, 10])
    assert open_checkpoint(folder).config.rope_layers == ("global", "none")
