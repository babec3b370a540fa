"""The command ``python -m traces learn``."""

from pathlib import Path
from typing import Annotated

from ground.command_line import Help
from ground.files import keep_apart
from ground.whole_number import WholeNumber


def learn(
    traces: Annotated[list[Path], Help("traces of one model; their profile splits are learned from")],
    /,
    *,
    output: Annotated[Path, Help("the model to write, .safetensors", "--output", "-o")],
    seed: WholeNumber = 0,
) -> None:
    """Learn which experts follow which, for the policy `pathwise`.

    For example:

    ```
    python -m traces learn traces/qwen3_law.npz -o law.safetensors
    ```
    """
    from ground.progress import Watch
    from traces.paths.learn import learn as learn_paths
    from traces.trace import Trace

    keep_apart(traces, {"--output": output})
    profiles = [Trace.load(path).select("profile") for path in traces]
    with Watch("learning") as watch:
        model = learn_paths(profiles, seed, seen=watch.at)
    model.save(output)
    print(f"{output}: from {model.record['rows']:,} tokens of {model.record['sequences']:,} sequences")
