"""The command ``python -m traces train``."""

from pathlib import Path
from typing import Annotated

from ground.command_line import Help
from ground.files import keep_apart
from ground.whole_number import WholeNumber


def train(
    base: Annotated[Path, Help("the dense model to start from: a Hugging Face folder or a .gguf file")],
    /,
    *,
    corpora: Annotated[Path, Help("folder of DOMAIN.jsonl.xz files")],
    output: Annotated[Path, Help("the checkpoint folder to make", "--output", "-o")],
    topology: Annotated[str, Help("the model whose routing topology is wanted")] = "mixtral-8x7b",
    domain: Annotated[
        list[str] | None,
        Help(
            "which domains of --corpora; default: law banking counselling code math; for switch-base-*, which "
            "answers prompts: translation summaries instructions"
        ),
    ] = None,
    minutes: Annotated[float | None, Help("how long to train at most; default: 6, or no limit with --tokens")] = None,
    tokens: Annotated[WholeNumber | None, Help("how many tokens to train on at most")] = None,
    batch: Annotated[WholeNumber, Help("sequences a step")] = 48,
    length: Annotated[WholeNumber, Help("tokens a sequence")] = 512,
    learning_rate: Annotated[float, Help("the highest learning rate of the schedule")] = 3e-4,
    balance: Annotated[float, Help("weight of the load-balancing loss over a step")] = 0.02,
    window_balance: Annotated[float, Help("weight of the same loss over windows of a sequence")] = 0.35,
    window: Annotated[WholeNumber, Help("tokens a window; --length is a multiple of it")] = 128,
    redrawn: Annotated[float, Help("share of an expert's neurons that start at random")] = 0.25,
    seed: WholeNumber = 0,
    device: Annotated[str, Help("cuda, cpu, or auto")] = "auto",
) -> None:
    r"""Train a small real Mixture-of-Experts model whose routing can be captured; its record lies beside the weights.

    For example:

    ```
    python -m traces train SmolLM2-135M-Instruct.Q4_1.gguf --corpora corpora \
        -o minimoe --minutes 6
    python -m traces train SmolLM2-135M-Instruct.Q4_1.gguf --corpora corpora \
        -o switch --topology switch-base-128 --domain translation
    ```
    """
    from traces.training.train import TrainingOptions
    from traces.training.train import train as train_model

    keep_apart([base, corpora], {}, folders={"--output": (output, [])})
    options = TrainingOptions(
        minutes=6.0 if minutes is None and tokens is None else minutes, tokens=tokens, batch=batch, length=length,
        learning_rate=learning_rate, balance=balance, window_balance=window_balance, window=window,
        redrawn=redrawn, seed=seed,
    )  # fmt: skip
    record = train_model(base, corpora, output, topology=topology, domains=domain, options=options, device=device)
    done = record["training"]
    print(
        f"{output}: {done['trained_tokens']:,} tokens in {done['seconds']:.0f} s, {done['tokens_per_s']:,.0f} a s, "
        f"loss {done['first_loss']:.2f} to {done['final_loss']:.2f}, "
        f"entropy {min(record['entropy_bits']):.2f} to {max(record['entropy_bits']):.2f} bits a layer"
    )
