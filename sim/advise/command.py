"""``python -m sim advise``."""

from ground.files import keep_apart
from ground.output import show, written
from ground.progress import Watch
from sim.advise.asked import Asked
from sim.listings import Json


def advise(*, asked: Asked, json: Json = None) -> None:
    r"""Say which engine and settings are fastest on a machine, how fast, how sure that is, and how to start them.

    Simulates what llama.cpp, ik_llama.cpp, KTransformers, FreeToken and vLLM can do with experts that do not fit, ranks
    it, and says what it hangs on and what other parts would bring.

    For example:

    ```
    python -m sim advise --model qwen3-30b-a3b --quant q4_k_m \
        --hardware rtx-3060 --host ddr4-3200x2 --context 16k
    python -m sim advise --model gpt-oss-120b --hardware rtx-4090 \
        --host ddr5-5600x2
    ```
    """
    from sim.advise.answer import advise as answer
    from sim.advise.view import view

    keep_apart(asked.files, {"--json": json})
    with written(json) as write:
        with Watch("advise") as watch:
            found = answer(asked, watch.at)
        show(view(found), json)
        write(found.to_json())
