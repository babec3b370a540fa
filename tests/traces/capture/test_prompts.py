"""A person's own prompts: files, conversations, one command, and a router family of one's own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.places import REPOSITORY
from traces.capture.prompts import Offered, batches, read_prompts

CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}a{% endif %}"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("one\n\n two  \nthree\nTwo\n", encoding="utf-8-sig")
    (text,) = read_prompts(path, "CC0")
    assert [row.prompt for row in text.profile] == ["one", "two", "Two"]  # equal prompts are on one side
    assert [row.prompt for row in text.eval] == ["three"]
    assert (text.domain, text.eval[0].licence, text.about) == ("mine", "CC0", "prompts of mine.txt")


def test_rows_say_their_domain_source_and_response(tmp_path):
    rows = [{"prompt": f"p{i}", "response": "r", "domain": "law" if i % 2 else "code", "source": "s"} for i in range(8)]
    code, law = read_prompts(write(tmp_path / "x.jsonl", rows))
    assert (code.domain, law.domain) == ("code", "law")
    assert [len(text.profile) for text in (code, law)] == [3, 3] and [len(text.eval) for text in (code, law)] == [1, 1]
    assert code.profile[0].response == "r" and code.profile[0].source == "s"


def test_a_lone_prompt_is_for_evaluation(tmp_path):
    (text,) = read_prompts(write(tmp_path / "x.jsonl", [{"prompt": "p"}]))
    assert not text.profile and len(text.eval) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object with either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "line 2: expected an object with either"),
        ('{"prompt": 3}', "line 2: field 'prompt' is 3; expected a text"),
        ('{"prompt": " "}', "line 2: field 'prompt' is ' '"),
        ('{"prompt": "a", "domain": ""}', "line 2: field 'domain' is ''"),
        (r'{"prompt": "a", "domain": "\u001b[31m"}', r"line 2: domain: '\\x1b\[31m' holds"),
        (r'{"prompt": "the court \ud83d clause"}', r"line 2: field 'prompt' holds '\\ud83d', half of a character"),
        (r'{"prompt": "a", "response": "\udc00"}', "line 2: field 'response' holds"),
        (r'{"prompt": "a", "source": "\ud800 x"}', "line 2: field 'source' holds"),
        (r'{"prompt": "a", "licence": "\udfff"}', "line 2: field 'licence' holds"),
        (r'{"messages": [{"role": "user", "content": "x \ud83d"}]}', "line 2: message 0: 'content' holds"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"messages": []}', r"line 2: field 'messages' is \[\]"),
        ('{"messages": [{"role": "user"}]}', "line 2: message 0 is"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 2: expected a user message"),
    ],
)
def test_a_wrong_row_is_named_by_line_and_field(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_prompts(path)


def test_an_empty_file_and_other_bytes_are_refused(tmp_path):
    (tmp_path / "x.txt").write_text("\n \n")
    with pytest.raises(InputError, match=r"x\.txt: no prompt in it"):
        read_prompts(tmp_path / "x.txt")
    for before in (b"", b"\xef\xbb\xbf", b"fine\n" * 9_999):
        (tmp_path / "x.txt").write_bytes(before + b"one\ntwo \xff\n")
        with pytest.raises(InputError, match=rf"x\.txt: line {before.count(10) + 2}: not UTF-8"):
            read_prompts(tmp_path / "x.txt")


def test_both_halves_of_a_character_are_read(tmp_path):
    (tmp_path / "x.jsonl").write_text(r'{"prompt": "\ud83d\ude42"}')
    assert read_prompts(tmp_path / "x.jsonl")[0].eval[0].prompt == "\U0001f642"


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize("chunk", [12, 20, 64])
def test_a_batch_never_has_more_rows_than_its_chunk(tmp_path, chunk):
    lengths = [3, 7, 1, 11, 2, 2, 2, 40, 5, 64, 65]
    path = tmp_path / "x.txt"
    path.write_text("".join("x" * length + "\n" for length in lengths))
    (text,) = read_prompts(path)
    rows = sorted(text.profile + text.eval, key=lambda row: lengths.index(len(row.prompt)))
    offered = Offered(rows, Letters(), "plain", "eval", longest=64)
    seen = [[len(given.prompt.ids) for given in batch] for batch in batches(offered, 4, chunk, new_tokens=6)]
    assert sorted(length for batch in seen for length in batch) == sorted(lengths)[:-1] and offered.left_out == 1
    for batch in seen:
        assert len(batch) <= 4 and (len(batch) == 1 or max(6, *batch) * len(batch) <= chunk)


# The rest needs torch.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.tiny_families import decoder
    from tests.support.tiny_moe import tokenizer

    folder = tmp_path_factory.mktemp("moe")
    decoder("olmoe").save_pretrained(folder)
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(folder)
    return folder


def captured(checkpoint, rows, tmp_path, **more):
    from traces.capture.capture import Amount, capture_prompts
    from traces.capture.decoding import Decoding
    from traces.trace import Trace

    path = tmp_path / "out.npz"
    settings = {"embedding": "none", "decoding": Decoding(mode="greedy")} | more
    amount = settings.pop("amount", Amount(None, None, prompt_tokens=999, new_tokens=4))
    capture_prompts(checkpoint, write(tmp_path / "chat.jsonl", rows), path, amount=amount, **settings)
    return Trace.load(path)


def test_turns_of_a_conversation_are_run_once(checkpoint, tmp_path):
    """Seen in NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807:
    a turn's last row is a dummy, the next turn holds the real one.
    And strands-rl/strands-sglang#72: every turn returns the whole history, and joining counted it again.
    """
    from traces.capture.decoding import Decoding

    turns = [("user", "the court"), ("assistant", "clause party"), ("user", "law judge"), ("assistant", "card money")]
    messages = [{"role": role, "content": content} for role, content in turns]
    trace = captured(checkpoint, [{"messages": messages}], tmp_path, decoding=Decoding(mode="teacher-forced"))
    from tests.support.tiny_moe import tokenizer

    words = tokenizer()
    history = words("user the court assistant clause party user law judge a")["input_ids"]
    # All of the history once, then the known answer but its last token, which no model ever runs.
    assert trace.token.tolist() == history + words("card money")["input_ids"][:1]
    assert trace.phase.tolist() == [0] * len(history) + [1]
    assert trace.position.tolist() == list(range(len(history) + 1))


def test_each_length_of_a_conversation_agrees_on_its_history(checkpoint, tmp_path):
    """Seen in NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807:
    a turn's last row is a dummy, the next turn holds the real one.
    """
    turns = [("user", "the court"), ("assistant", "clause party"), ("user", "law judge")]
    messages = [{"role": role, "content": content} for role, content in turns]
    trace = captured(checkpoint, [{"messages": messages[:1]}, {"messages": messages}], tmp_path)
    short, long = (trace.experts[(trace.sequence == s) & (trace.phase == 0)] for s in (0, 1))
    assert (short[:3] == long[:3]).all() and len(long) == 10 > len(short)


def test_messages_need_a_chat_template(checkpoint, tmp_path):
    from tests.support.tiny_moe import tokenizer

    bare = tmp_path / "bare"
    bare.mkdir()
    for file in checkpoint.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer().save_pretrained(bare)
    with pytest.raises(InputError, match="no chat template"):
        captured(bare, [{"messages": [{"role": "user", "content": "law"}]}], tmp_path)
    assert not (tmp_path / "out.npz").exists()


def test_several_domains_are_one_trace_with_one_embedding_basis(checkpoint, tmp_path):
    rows = [{"prompt": f"law judge {'clause ' * i}", "domain": "law" if i % 2 else "code"} for i in range(1, 9)]
    trace = captured(checkpoint, rows, tmp_path, embedding="8x4", basis_path=tmp_path / "basis.npz")
    assert set(trace.domain) == {"law", "code"} and trace.embeddings is not None
    assert trace.meta["text"]["source"] == "law: prompts of chat.jsonl; code: prompts of chat.jsonl"
    assert "joined" not in trace.meta and trace.meta["decoding"]["mode"] == "greedy"


def test_one_prompt_is_enough_and_long_ones_are_counted(checkpoint, tmp_path):
    from traces.capture.capture import Amount

    trace = captured(checkpoint, [{"prompt": "law"}], tmp_path, embedding="auto", basis_path=tmp_path / "b.npz")
    assert trace.split.tolist() == ["eval"] and trace.n_rows == 1 + 3 and trace.embeddings is not None
    amount = Amount(None, None, prompt_tokens=2, new_tokens=4)
    rows = [{"prompt": text} for text in ("law", "law judge card", "judge", "money")]
    trace = captured(checkpoint, rows, tmp_path, amount=amount)
    assert "chat: 1 of 3 profile prompts left out, over 2 tokens" in [
        note.removeprefix("domain ") for note in trace.meta["notes"]
    ]


def test_no_decode_rows_leave_embeddings_out(checkpoint, tmp_path):
    from traces.capture.capture import Amount

    amount = Amount(None, None, prompt_tokens=9, new_tokens=1)
    trace = captured(checkpoint, [{"prompt": "law judge"}], tmp_path, amount=amount, embedding="auto")
    assert trace.n_rows == 2 and trace.embeddings is None


def test_the_command_needs_one_kind_of_text(checkpoint, tmp_path, capsys):
    from traces.__main__ import main

    path = tmp_path / "p.txt"
    path.write_text("law\njudge\n")
    out = tmp_path / "o.npz"
    command = ["capture", str(checkpoint), "-o", str(out)]
    assert main([*command, "--prompts", str(path), "--embedding", "none", "--new-tokens", "3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    out.unlink()
    wrong = [[], ["--prompts", str(path), "--corpora", "x", "--domain", "law"], ["--corpora", str(tmp_path)]]
    wrong += [["--prompts", str(path), *more] for more in (["--batch", "0"], ["--chunk", "3"], ["--adapter", "x.py"])]
    wrong += [["--prompts", str(tmp_path / "none.txt")]]
    for more in wrong:
        assert main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not out.exists()


def spooled(pid, folder):
    """Bytes that a process has written to the temporary files it holds open in a folder."""
    total = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(entry).startswith(str(folder)):  # noqa: PTH115 (the name of a deleted file is kept as it is)
                total += entry.stat().st_size
    return total


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are looked up in /proc")
def test_a_killed_capture_leaves_nothing_behind(checkpoint, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("".join(f"law judge {'clause ' * (i % 30)}\n" for i in range(4000)))
    out = tmp_path / "folder" / "o.npz"
    out.parent.mkdir()
    command = [sys.executable, "-m", "traces", "capture", str(checkpoint), "--prompts", str(path), "-o", str(out)]
    spool = tmp_path / "spool"
    spool.mkdir()
    environment = os.environ | {"TMPDIR": str(spool)}
    running = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not spooled(running.pid, spool) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running.poll() is None and spooled(running.pid, spool), "it ended before it could be killed"
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert list(out.parent.iterdir()) == [] and list(spool.iterdir()) == []


def test_a_name_on_the_hub_is_fetched_and_kept_as_the_name(checkpoint, tmp_path, monkeypatch):
    import huggingface_hub

    from traces.capture.checkpoint import located, model_name

    kept = tmp_path / "models--someone--Tiny-MoE" / "snapshots" / "0a1b"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(checkpoint)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or str(kept)
    )
    monkeypatch.chdir(tmp_path)
    assert located("someone/Tiny-MoE") == kept and asked == ["someone/Tiny-MoE"]
    assert model_name("someone/Tiny-MoE") == model_name(kept) == "Tiny-MoE"

    def missing(name, allow_patterns):
        raise OSError("404 not found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(InputError, match="nobody/none: no such folder, and the hub does not give it"):
        located("nobody/none")


def test_a_known_name_with_another_shape_does_not_get_its_sizes(checkpoint, tmp_path):
    copy = tmp_path / "olmoe-1b-7b"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    trace = captured(copy, [{"prompt": "law"}], tmp_path)
    assert trace.meta["model"]["name"] == "olmoe-1b-7b (olmoe of another size)"
    from traces.models.known import resolve_model

    assert resolve_model(trace.meta["model"], trace.layers).expert_bytes[0] == 3 * 32 * 16 * 4


def test_packed_mxfp4_experts_run_unpacked_and_cost_what_the_file_holds(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from tests.support.tiny_families import decoder
    from tests.support.tiny_moe import tokenizer
    from traces.models.known import resolve_model

    decoder("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    packed = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj") and "experts" in name:
            experts, inner, outer = weight.shape
            shape = (experts, outer, inner // 32)
            packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            packed[f"{name}_scales"] = torch.full(shape, 125, dtype=torch.uint8)
        else:
            packed[name] = weight
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = captured(tmp_path, [{"prompt": "law judge"}], tmp_path)
    assert trace.n_rows == 5 and trace.n_layers == 3
    assert resolve_model(trace.meta["model"], range(3)).expert_bytes == (3 * 32 * 32 * 17 // 32,) * 3


def test_the_readings_of_the_guide_run_as_they_stand(tmp_path):
    """The example of docs/capture.md: a model and a router family of one's own, captured by the command shown."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from traces.__main__ import main
    from traces.trace import Trace

    text = (REPOSITORY / "docs" / "capture.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    model, adapter = (next(block for block in blocks if block.startswith(f"# {name}")) for name in ("mine", "family"))
    (tmp_path / "mine.py").write_text(model)
    (tmp_path / "family.py").write_text(adapter)
    sys.path.insert(0, str(tmp_path))
    try:
        import mine

        from tests.support.tiny_moe import tokenizer

        torch = pytest.importorskip("torch")
        torch.manual_seed(1)
        built = mine.MineForCausalLM(mine.MineConfig(vocab_size=160))
        built.save_pretrained(tmp_path / "checkpoint")
        tokenizer().save_pretrained(tmp_path / "checkpoint")
        (tmp_path / "prompts.txt").write_text("the court\nlaw judge card\nmoney bank\n")
        out = tmp_path / "o.npz"
        command = ["capture", str(tmp_path / "checkpoint"), "--prompts", str(tmp_path / "prompts.txt"), "-o", str(out)]
        adapter_option = ["--adapter", str(tmp_path / "family.py")]
        assert main([*command, "--embedding", "none", "--new-tokens", "4", *adapter_option]) == 0
        trace = Trace.load(out)
        assert (trace.n_layers, trace.top_k, trace.n_experts) == (2, 2, 6)
        model = mine.MineForCausalLM.from_pretrained(tmp_path / "checkpoint")
        row = np.flatnonzero(trace.sequence == 0)
        kept = []
        for layer in model.model.layers:
            layer.mlp.route.register_forward_hook(lambda module, inputs, output: kept.append(output["chosen"]))
        model(torch.tensor([trace.token[row].tolist()]))
        assert (trace.experts[row] == torch.stack(kept, dim=1).numpy()).all()
        again = [sys.executable, "-m", "traces", "verify", str(out), "--model", str(tmp_path / "checkpoint")]
        places = os.pathsep.join([str(tmp_path), str(REPOSITORY)])  # a new process, in which nothing has imported mine
        done = subprocess.run(
            [*again, *adapter_option], env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True
        )
        assert (done.returncode, "routes are equal (100.00%" in done.stdout) == (0, True), done.stderr
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("mine", None)
