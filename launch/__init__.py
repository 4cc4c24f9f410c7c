"""Scripts that start training: on this machine, on TPU VMs, on GKE. docs/pods.md is their manual."""

import importlib.util
import sys

if missing := [name for name in ("rich", "typer", "yaml") if importlib.util.find_spec(name) is None]:
    print(f"the launchers need {', '.join(missing)}: pip install rich typer PyYAML", file=sys.stderr)
    raise SystemExit(2)
