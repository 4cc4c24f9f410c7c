"""Model families: what each reads and writes of Hugging Face's config.json."""
