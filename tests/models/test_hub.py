from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file

from rekindle.errors import ModelError
from rekindle.models.pull import pull

from .fake_hub import FakeHub
from .tiny import RecordedProgress, gguf_bytes

REPO = "org/repo"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return gguf_bytes(tmp_path, rows=64)


def test_a_repository_alone_gives_its_preferred_file(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"README.md": b"", "m-Q8_0.gguf": b"other", "m-Q4_K_M.gguf": content}
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert path == models_dir / "hub" / "org" / "repo" / "m-Q4_K_M.gguf"
    assert path.read_bytes() == content
    assert progress.tasks == [("Downloading m-Q4_K_M.gguf", len(content))]
    assert progress.advanced == [len(content)]


@pytest.mark.parametrize("wanted", ["Q8_0", "q8_0", "m-Q8_0.gguf"])
def test_a_quantisation_or_a_file_can_be_asked_for(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress, wanted: str
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content, "m-Q4_K_M.gguf": b"other"}
    path = pull(f"{REPO}:{wanted}", models_dir=models_dir, progress=progress)
    assert path.name == "m-Q8_0.gguf"


def test_a_pulled_model_is_found_without_the_hub(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q4_K_M.gguf": content}
    path = pull(REPO, models_dir=models_dir, progress=progress)
    asked = len(hub.asked)
    assert pull(f"{REPO}:q4_k_m", models_dir=models_dir, progress=progress) == path
    assert pull(REPO, models_dir=models_dir, progress=progress) == path
    assert len(hub.asked) == asked


def test_a_split_model_is_fetched_whole_and_named_by_its_first_file(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress, tmp_path: Path
) -> None:
    names = [f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.repos[REPO] = {n: gguf_bytes(tmp_path, rows=r) for r, n in enumerate(names, 1)}
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert path == models_dir / "hub" / REPO / names[0]
    for name, content in hub.repos[REPO].items():
        assert (models_dir / "hub" / REPO / name).read_bytes() == content
    assert progress.tasks[1][0] == f"Downloading {names[1]} (2 of 3)"


def test_a_split_model_fetches_only_its_missing_files(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    names = [f"m-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    hub.repos[REPO] = dict.fromkeys(names, content)
    first = pull(REPO, models_dir=models_dir, progress=progress)
    first.with_name(names[1]).unlink()
    asked = len(hub.downloads)
    assert pull(REPO, models_dir=models_dir, progress=progress) == first
    assert len(hub.downloads) == asked + 1


def test_a_cut_connection_is_resumed_within_one_pull(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    hub.cut_after = 1000
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert path.read_bytes() == content
    assert hub.ranges == [None, "bytes=1000-"]
    assert progress.advanced == [len(content)]


def interrupt(hub: FakeHub, models_dir: Path, progress: RecordedProgress) -> None:
    """Pull 1000 bytes, then let the hub go down."""
    hub.cut_after = 1000
    hub.status_after_cut = 503
    with pytest.raises(ModelError, match="answered 503"):
        pull(REPO, models_dir=models_dir, progress=progress)
    hub.download_status = None


def test_an_interrupted_pull_leaves_nothing_under_the_final_name(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    interrupt(hub, models_dir, progress)
    assert not list(models_dir.glob("hub/**/*.gguf"))
    assert progress.open == 0


def test_the_next_pull_resumes_an_interrupted_one(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    interrupt(hub, models_dir, progress)
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert path.read_bytes() == content
    assert hub.ranges[-1] == "bytes=1000-"
    assert progress.advanced[-1] == len(content)
    assert not list(models_dir.rglob("*.part"))


def test_a_changed_file_is_fetched_from_its_start(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress, tmp_path: Path
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    interrupt(hub, models_dir, progress)
    hub.repos[REPO] = {"m-Q8_0.gguf": (newer := gguf_bytes(tmp_path, rows=32))}
    assert pull(REPO, models_dir=models_dir, progress=progress).read_bytes() == newer
    assert hub.ranges[-1] is None


def test_a_server_without_ranges_sends_the_whole_file_again(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    hub.ignores_ranges = True
    hub.cut_after = 1000
    assert pull(REPO, models_dir=models_dir, progress=progress).read_bytes() == content
    assert progress.advanced == [len(content)]


def test_a_part_longer_than_the_file_is_fetched_from_its_start(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    interrupt(hub, models_dir, progress)
    (part,) = models_dir.rglob("*.part")
    part.write_bytes(bytes(len(content) + 1))
    assert pull(REPO, models_dir=models_dir, progress=progress).read_bytes() == content


def test_damaged_bytes_are_not_kept(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    hub.corrupt = True
    with pytest.raises(ModelError, match="arrived damaged"):
        pull(REPO, models_dir=models_dir, progress=progress)
    assert not [path for path in models_dir.rglob("*") if path.suffix in (".gguf", ".part")]
    hub.corrupt = False
    assert pull(REPO, models_dir=models_dir, progress=progress).read_bytes() == content


def test_the_token_is_sent_to_the_hub_and_not_to_where_it_redirects(
    hub: FakeHub,
    content: bytes,
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repos[REPO] = {"m-Q8_0.gguf": content}
    hub.redirect_to = hub.address.replace("127.0.0.1", "localhost")
    pull(REPO, models_dir=models_dir, progress=progress)
    tokens = [headers.get("authorization") for headers in hub.downloads]
    assert tokens == ["Bearer hf_secret", None]


def test_a_private_repository_is_pulled_with_its_token_only(
    hub: FakeHub,
    folder: dict[str, bytes],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repos[REPO] = folder
    hub.token = "hf_secret"
    for given in ("", "hf_other"):
        monkeypatch.setenv("HF_TOKEN", given)
        with pytest.raises(ModelError, match=r"or it is private.*set HF_TOKEN"):
            pull(REPO, models_dir=models_dir, progress=progress)
    assert not hub.downloads
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert (path / "model-00002-of-00002.safetensors").is_file()
    monkeypatch.delenv("HF_TOKEN")
    assert pull(REPO, models_dir=models_dir, progress=progress) == path  # it is here now


def test_offline_mode_takes_what_is_here_and_asks_nobody(
    hub: FakeHub,
    folder: dict[str, bytes],
    models_dir: Path,
    progress: RecordedProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repos[REPO] = hub.repos["org/other"] = folder
    path = pull(REPO, models_dir=models_dir, progress=progress)
    asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()  # it was made while online
    assert pull(REPO, models_dir=models_dir, progress=progress) == path
    with pytest.raises(ModelError, match="not on this machine and HF_HUB_OFFLINE is set"):
        pull("org/other", models_dir=models_dir, progress=progress)
    assert len(hub.asked) == asked


def test_a_missing_repository_is_a_clear_error(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress
) -> None:
    with pytest.raises(ModelError, match=r"no repository org/gone.*HF_TOKEN"):
        pull("org/gone", models_dir=models_dir, progress=progress)


@pytest.mark.parametrize(
    ("status", "says"), [(401, "HF_TOKEN"), (404, "no repository"), (500, "answered 500")]
)
def test_a_refusal_of_the_hub_is_explained(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress, status: int, says: str
) -> None:
    hub.list_status = status
    with pytest.raises(ModelError, match=says):
        pull(REPO, models_dir=models_dir, progress=progress)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"id": "org/repo", "sha": "1", "siblings": [1]}',
        b'{"id": "org/repo", "siblings": [{"rfilename": "m.gguf"}]}',
        b'{"id": "org/repo", "sha": "1", "siblings": [{"rfilename": 5}]}',
        b'{"id": "org/repo", "sha": "1", "siblings": [{"rfilename": "m.gguf", "size": "1"}]}',
    ],
)
def test_an_answer_that_is_not_a_listing_is_explained(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress, body: bytes
) -> None:
    hub.list_body = body
    with pytest.raises(ModelError, match="not from a model hub"):
        pull(REPO, models_dir=models_dir, progress=progress)


def test_a_missing_quantisation_lists_the_available_files(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": b"", "m-Q4_0.gguf": b"", "mmproj-Q5_1.gguf": b""}
    with pytest.raises(ModelError, match=r"no file with Q5_1.*m-Q4_0\.gguf, m-Q8_0\.gguf\."):
        pull(f"{REPO}:Q5_1", models_dir=models_dir, progress=progress)


def test_a_repository_without_a_model_says_so(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {"model.safetensors": b""}
    with pytest.raises(ModelError, match="has no complete GGUF model"):
        pull(REPO, models_dir=models_dir, progress=progress)


def test_a_long_list_of_choices_is_shortened(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = {f"model-{n:02}.gguf": b"" for n in range(30)}
    with pytest.raises(ModelError, match=r"several files.*model-19\.gguf and 10 more"):
        pull(REPO, models_dir=models_dir, progress=progress)


@pytest.mark.parametrize(
    "name", ["../../../up.gguf", "/up.gguf", ".pulls/up.gguf", "a\\..\\up.gguf"]
)
def test_a_hub_cannot_write_outside_the_folder_of_its_repository(
    hub: FakeHub, content: bytes, models_dir: Path, progress: RecordedProgress, name: str
) -> None:
    hub.repos[REPO] = {name: content}
    with pytest.raises(ModelError, match="has no complete GGUF model"):
        pull(REPO, models_dir=models_dir, progress=progress)


def test_no_network_is_a_clear_error(
    models_dir: Path, progress: RecordedProgress, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="Cannot reach the hub"):
        pull(REPO, models_dir=models_dir, progress=progress)


def test_a_repository_name_the_hub_forbids_is_a_clear_error(
    hub: FakeHub, models_dir: Path, progress: RecordedProgress
) -> None:
    with pytest.raises(ModelError, match="Cannot fetch org/a--b"):
        pull("org/a--b", models_dir=models_dir, progress=progress)


# -- models that are folders ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, bytes]:
    """The files of a model folder in two shards, as on a hub."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: np.zeros(400, np.float32)}, tmp_path / name)
    index = json.dumps({"weight_map": {name: name for name in names}}).encode()
    return {
        "config.json": b"{}",
        **{name: (tmp_path / name).read_bytes() for name in names},
        "model.safetensors.index.json": index,
        "tokenizer.json": b'{"tokens": 3}',
        "chat_template.jinja": b"{{ messages }}",
    }


OTHERS = {
    "README.md": b"#",
    "modeling_evil.py": b"raise SystemExit",
    "original/model.safetensors": b"",
    "onnx/config.json": b"",
    "pytorch_model.bin": b"",
}


def test_a_repository_of_a_folder_is_fetched_whole_and_nothing_else_of_it(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = folder | OTHERS
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert path == models_dir / "hub" / "org" / "repo"
    assert {each.name: each.read_bytes() for each in path.iterdir()} == folder
    assert progress.advanced == [len(content) for content in folder.values()]
    assert progress.tasks[1][0] == f"Downloading {list(folder)[1]} (2 of 6)"


def test_the_modules_of_an_embedding_model_are_fetched_with_it(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    modules = {"1_Pooling/config.json": b'{"pooling_mode": "mean"}', "2_Dense/config.json": b"{}"}
    others = {"onnx/config.json": b"{}", "1_Pooling/code.py": b"", "1_A/1_B/config.json": b"{}"}
    hub.repos[REPO] = folder | modules | others
    path = pull(REPO, models_dir=models_dir, progress=progress)
    found = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
    assert found == {*folder, *modules}
    assert (path / "1_Pooling/config.json").read_bytes() == modules["1_Pooling/config.json"]


def test_a_pulled_folder_is_found_without_the_hub(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = folder
    path = pull(REPO, models_dir=models_dir, progress=progress)
    asked = len(hub.asked)
    assert pull(REPO, models_dir=models_dir, progress=progress) == path
    assert len(hub.asked) == asked


def test_the_pull_of_a_folder_resumes(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    large = "model-00001-of-00002.safetensors"
    hub.repos[REPO] = {large: folder[large]} | folder
    interrupt(hub, models_dir, progress)
    assert not (models_dir / "hub").exists()
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert (path / large).read_bytes() == folder[large]
    assert "bytes=1000-" in hub.ranges
    assert not list(models_dir.rglob("*.part"))


def test_files_of_two_commits_are_never_mixed(
    hub: FakeHub,
    folder: dict[str, bytes],
    models_dir: Path,
    progress: RecordedProgress,
) -> None:
    hub.repos[REPO] = folder
    hub.fails_at = list(folder)[3]
    with pytest.raises(ModelError, match="answered 503"):
        pull(REPO, models_dir=models_dir, progress=progress)
    hub.fails_at = None
    newer = folder | {"config.json": b'{"newer": 1}'}
    hub.repos[REPO] = newer
    hub.commit = "f" * 40
    path = pull(REPO, models_dir=models_dir, progress=progress)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == newer


def test_a_damaged_shard_is_not_kept(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = folder
    hub.corrupt = True
    with pytest.raises(ModelError, match="arrived damaged"):
        pull(REPO, models_dir=models_dir, progress=progress)
    assert not (models_dir / "hub").exists()


def test_a_repository_of_both_formats_gives_its_gguf_file(
    hub: FakeHub,
    folder: dict[str, bytes],
    content: bytes,
    models_dir: Path,
    progress: RecordedProgress,
) -> None:
    hub.repos[REPO] = folder | {"m-Q8_0.gguf": content}
    assert pull(REPO, models_dir=models_dir, progress=progress).name == "m-Q8_0.gguf"


def test_a_folder_is_pulled_whole_or_not_at_all(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = folder
    with pytest.raises(ModelError, match=r"one model in a folder\. Omit :Q4_0"):
        pull(f"{REPO}:Q4_0", models_dir=models_dir, progress=progress)


def test_a_folder_with_a_shard_missing_is_refused(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    lost = "model-00002-of-00002.safetensors"
    hub.repos[REPO] = {name: content for name, content in folder.items() if name != lost}
    with pytest.raises(ModelError, match=f"lacks {lost}"):
        pull(REPO, models_dir=models_dir, progress=progress)


def test_a_folder_does_not_replace_other_content(
    hub: FakeHub, folder: dict[str, bytes], models_dir: Path, progress: RecordedProgress
) -> None:
    hub.repos[REPO] = folder
    mine = models_dir / "hub" / REPO / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ModelError, match="already has other content"):
        pull(REPO, models_dir=models_dir, progress=progress)
    assert mine.read_text() == "mine"
