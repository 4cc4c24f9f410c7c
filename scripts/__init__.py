"""What makes the project's goldens, comparisons and pictures, and tries to break it; run from the repository's root.

| command | what it does |
|---|---|
| `python -m scripts.compare NAME` | trains or measures what the papers compare, and writes the tables of docs/ |
| `python -m scripts.train_chains` | makes models of chains |
| `python -m scripts.goldens KIND` | what transformers, PEFT and vLLM compute, for tests |
| `python -m scripts.torture KIND` | interrupts, damages and fuzzes |
| `python -m scripts.faults plant`, `draw` | do the tests notice slips in the code? |
"""
