"""GGUF files, as llama.cpp has them: read, and turned into what a Hugging Face folder would hold.

`header` reads a file's metadata and the places of its tensors, `hyperparameters` and `rope` turn the metadata into a
`config.json`, `tokenizer` into a tokenizer's files, `weights` finds and reads our tensors, `source` puts them together.
"""
