"""Write what other programs compute, for the tests, which read files and need neither torch nor transformers.

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch transformers
    /tmp/oracle/bin/python -m scripts.goldens models --only granite-full

| kind | what | needs |
|---|---|---|
| models | tiny random models of every family and their logits: tests/golden | transformers |
| linear | the same of hybrids with linear layers: tests/golden/linear | transformers |
| generation | greedy replies of these models: tests/golden/generated.json | transformers, models |
| configs | layers, windows and tensors of tests/checkpoint/families/configs | transformers |
| texts | chat templates and special tokens: tests/golden/texts.json | transformers |
| real | logits of the models of `make models`: tests/golden/real | transformers, gguf; 6 GB |
| losses | losses of these on a text: tests/golden/text_losses.json | transformers, gguf, lm-eval |
| adapters | adapters as PEFT saves them: tests/checkpoint/peft_adapters | transformers, peft |
| ruler | RULER's prompts of made-up data: tests/golden/ruler.json | nvidia-long-context-eval's wheel, by --wheel |
| served | what vLLM plans for a cache: tests/checkpoint/vllm_groups.json | vLLM's wheel, by --wheel |
| exports | our exports under eleven patterns, run by transformers: tests/checkpoint/exports.json | --oracle |
| peft | our adapters, loaded by PEFT: tests/checkpoint/adapters.json | --oracle |

Run all but the last two in a Python that has what they need, and the last two in ours: `--oracle` names the other.
Models are float32 with eager attention on the CPU. `--only` writes some of a kind anew and keeps the others.
"""

import argparse
import importlib
import sys
from pathlib import Path

KINDS = "models linear generation configs texts real losses adapters ruler served exports peft"
MODULES = {kind: kind for kind in KINDS.split()} | {"losses": "real", "peft": "exports"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=MODULES)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these alone; the others stay")
    parser.add_argument("--oracle", type=Path, help="a Python with torch, transformers and peft (exports, peft)")
    parser.add_argument("--wheel", type=Path, help="vllm-*.whl (served), nvidia_long_context_eval-*.whl (ruler)")
    given = parser.parse_args()
    for needed, kinds in (("oracle", ("exports", "peft")), ("wheel", ("ruler", "served"))):
        if given.kind in kinds and getattr(given, needed) is None:
            parser.error(f"{given.kind} needs --{needed}")
    module = importlib.import_module(f"scripts.goldens.{MODULES[given.kind]}")
    return getattr(module, f"write_{given.kind}")(given) or 0


if __name__ == "__main__":
    sys.exit(main())
