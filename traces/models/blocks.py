"""How many bytes a matrix takes in each format that weights are stored in: blocks of weights with their scales."""

from ground.errors import InputError

BLOCKS: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82),
    "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_nl": (32, 18), "iq4_xs": (256, 136),
    "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17), "nvfp4": (16, 9),
}  # fmt: skip
"""Weights of one block and its bytes. Those of GGUF are as ggml defines them (ggml-common.h of ggml-org/llama.cpp).
mxfp4 is that of OCP Microscaling Formats 1.0; nvfp4 has an 8-bit scale for 16 weights."""

TILE = 128
"""Rows and columns of a tile that has one scale in fp8, as DeepSeek-V3 stores it (arXiv 2412.19437). In int4 as many
weights of a row have one."""
OTHERS = ("fp8", "int4-awq", "int4-gptq")
"""Formats whose scales do not lie in the blocks."""
FORMATS = (*BLOCKS, *OTHERS)


def matrix_bytes(form: str, columns: int, rows: int) -> int:
    """Bytes of ``rows`` of ``columns`` weights. A row's last block is a whole one. Raises InputError for no format.

    fp8: one byte a weight, and a float32 for each tile. int4 as AutoAWQ and GPTQ write it: half a byte a weight, for
    each 128 of a row a scale of 2 bytes and a zero point of 4 bits, of which 8 rows share 4 bytes; GPTQ adds 4 bytes a
    column for its order.
    """
    if form in BLOCKS:
        weights, size = BLOCKS[form]
        return rows * -(-columns // weights) * size
    groups = -(-columns // TILE)
    if form == "fp8":
        return columns * rows + 4 * groups * -(-rows // TILE)
    if form not in OTHERS:
        raise InputError(f"format {form!r} is unknown; expected one of {', '.join(FORMATS)}")
    packed = -(-columns // 8) * 4 * rows + groups * (2 * rows + -(-rows // 8) * 4)
    return packed + (4 * columns if form == "int4-gptq" else 0)
