"""Training data: documents and prompts, packed into rows and mixed, as a grain iterator that resumes exactly.

`batches.make_batches` is what training calls; docs/data.md says what it reads and how to tokenise ahead.
"""
