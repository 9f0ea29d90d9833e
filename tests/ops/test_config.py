from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from common import config as cfg
from common.config_load import locate
from common.config_types import When
from common.errors import ConfigError
from decoded.config import DecodeConfig, split_address
from prefilld.config import PrefillConfig

FAKE = '[engine]\nbackend = "fake"\n'


def problems(text: str, root: type[cfg.SharedConfig] = DecodeConfig, base: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        cfg.parse_text(text, root, base=base)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[routing]\ntreshold_tokens = 3",
            "routing.treshold_tokens: unknown key; did you mean 'threshold_tokens'? (line 4)",
        ),
        ("[routin]\nmode = 3", "routin: unknown key; did you mean 'routing'? (line 3)"),
        ("[log]\nqqq = 1", "log.qqq: unknown key; known here: level, format, trace_file (line 4)"),
        ('[http]\nport = "8000"', "http.port: should be a valid integer (got '8000') (line 4)"),
        ("[http]\nport = 65536", "http.port: should be less than or equal to 65535 (got 65536) (line 4)"),
        ("[http]\nallow_route_override = 1", "http.allow_route_override: should be a valid boolean (got 1) (line 4)"),
        ("[links]\nheartbeat = 2", 'links.heartbeat: 2 has no unit: write a string like "2s" or "2ms" (line 4)'),
        ('[links]\nheartbeat = "1h"', 'links.heartbeat: should be less than or equal to "1min" (got "1h") (line 4)'),
        (
            '[links]\npiece_bytes = "9MiB"',
            'links.piece_bytes: should be less than or equal to "8MiB" (got "9MiB") (line 4)',
        ),
        ('[links]\npiece_bytes = "big"', "links.piece_bytes: 'big' is not a size"),
        ('[log]\nlevel = "loud"', "log.level: should be 'debug', 'info', 'warning' or 'error' (got 'loud') (line 4)"),
        ("[routing]\nthreshold_tokens = -1", "routing.threshold_tokens: must be a whole number of tokens >= 0"),
        ("[routing]\nthreshold_tokens = 1.5", "routing.threshold_tokens: must be a whole number of tokens >= 0"),
        (
            '[routing]\nmode = "remote-only"',
            'routing.mode: "remote-only" needs at least one entry in [[peers]] (line 4)',
        ),
        ("[http]\nhost = '0.0.0.0'", "http.host: '0.0.0.0' can be reached from other machines: set http.api_key_file"),
        ("[http]\nhost = ''", "http.host: String should have at least 1 character"),
        ("[http]\nmax_connections = 0", "http.max_connections: should be greater than or equal to 1 (got 0)"),
        ("[http]\nmax_body_bytes = '512MiB'", "http.max_total_body_bytes: less than http.max_body_bytes"),
        ("[[peers]]\nname = 'a'", "peers[0].address: is required (line 3)"),
        ("[[peers]]\nname = 'a b'\naddress='h:1'", "peers[0].name: has the wrong form"),
        ("[[peers]]\nname = 'a'\naddress='h'", 'peers[0].address: must be "host:port"'),
        ("[[peers]]\nname = 'a'\naddress='::1:7400'", "peers[0].address: an IPv6 address needs brackets"),
        ("[[peers]]\nname = 'a'\naddress='localhost:0'", "peers[0].address: port '0' is not between 1 and 65535"),
        (
            "[[peers]]\nname = 'a'\naddress='10.0.0.7:7400'",
            "peers[0].address: 10.0.0.7:7400 is not on this machine: set sec",
        ),
        ("[peers]\nname = 'a'", "peers: must be an array (line 3)"),
        (
            "[stream]\ncredit_bytes = '64KiB'",
            "stream.credit_bytes: 64KiB cannot hold one piece of links.piece_bytes = 1MiB",
        ),
        ("[stream]\nmax_staged_bytes = '64KiB'", "stream.max_staged_bytes: 64KiB cannot hold one segment"),
        ("[stream]\nlease = '3s'", "stream.lease: 3 s is less than two heartbeats of 2 s"),
        ("[links]\nreconnect_max = '50ms'", "links.reconnect_max: is less than links.reconnect_min"),
        ("[fake]\nwindow_layers = 9", "fake.window_layers: 9 windowed layers do not fit into num_layers = 8"),
        ("[node]\nname = '-x'", "node.name: has the wrong form"),
        (f"[control]\nsocket = '/{'x' * 107}'", "control.socket: the path has 108 bytes, a Unix socket's may have 107"),
        (
            "[security]\nkey_file = '/none/key'",
            "security.key_file: /none/key cannot be read: No such file or directory",
        ),
        ("[security]\nkey_file = '/'", "security.key_file: / is not a regular file"),
        ("[security]\nmode = 'no'", "security.mode: should be 'key' or 'tls' (got 'no')"),
        (
            "[[peers]]\nname = 'a'\naddress='localhost:1'\ntls_name = 'b'",
            'peers[0].tls_name: is not used with security.mode = "key": remove it (line 6)',
        ),
        (
            "[[peers]]\nname = 'a'\naddress='localhost:1'\ntls_name = '*.b'",
            "peers[0].tls_name: must be a host name or an IP address (got '*.b') (line 6)",
        ),
        ("[http]\napi_key_file = '/none/keys'", "http.api_key_file: /none/keys cannot be read"),
        ('[control]\nsocket = "/tmp/a\\u0000b"', "control.socket: must not have a NUL byte: no file has such a name"),
        ("[drain]\ntimeout = '-1s'", "drain.timeout: '-1s' is not a duration"),
    ],
)
def test_one_problem_with_its_path_value_limit_and_line(text: str, says: str) -> None:
    found = problems(FAKE + text)
    assert len(found) == 1, found
    assert says in found[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\ndevice = 'tpu'", "engine.device: has the wrong form"),
        ("[engine]\ndtype = 'fp8'", "engine.dtype: should be 'float32', 'bfloat16' or 'float16' (got 'fp8')"),
        ("[engine]\ncpus = [4096]", "engine.cpus: core 4096 does not exist or is not allowed here; allowed: "),
        ("[engine]\ncpus = [0, 'a']", "engine.cpus[1]: should be a valid integer (got 'a') (line 2)"),
        ("[engine]\nthreads = -1", "engine.threads: should be greater than or equal to 0 (got -1) (line 2)"),
        (
            '[engine]\nweights = "int8"\ndtype = "bfloat16"',
            'engine.weights: "int8" needs dtype = "float32" on device = "cpu", not "bfloat16" on "cpu"',
        ),
        ("[engine]\ncompile = true", 'engine.compile: compiles what torch computes, but weights = "exact" on a CPU'),
        ("[model]\npath = '/nowhere'", "model.path: /nowhere is not a directory, or may not be entered; `make model`"),
        ("", 'model.path: is required when engine.backend is "local"'),
        (
            "[engine]\nsegment_bytes = 16",
            'engine.segment_bytes: should be greater than or equal to "16KiB" (got "16B")',
        ),
        ("engine = 3", "engine: must be a table of keys (got 3) (line 1)"),
        ("a = [", "not valid TOML"),
        ("[engine]\n[engine]", "engine: is given twice, first in line 1 (line 2)"),
        ("[log]\nlevel = 'info'\n# x\nlevel = 'info'", "log.level: is given twice, first in line 2 (line 4)"),
    ],
)
def test_engine_and_file(text: str, says: str) -> None:
    assert any(says in p for p in problems(text, PrefillConfig)), problems(text, PrefillConfig)


def test_what_is_no_number_is_said_to_be_none() -> None:
    (found,) = problems('[engine]\nbackend = "fake"\n[fallback]\nlocal_prefill_tokens_per_s = nan\n')
    assert found == "fallback.local_prefill_tokens_per_s: must be a number (got nan) (line 4)"


def test_a_digit_of_the_limit_is_not_taken_for_what_was_got() -> None:
    (found,) = problems('[engine]\nbackend = "fake"\n[fake]\nvocab_size = 0\n')
    assert found == "fake.vocab_size: should be greater than or equal to 2 (got 0) (line 4)"
    (found,) = problems('[engine]\nbackend = "fake"\n[http]\nport = 655350\n')
    assert found == "http.port: should be less than or equal to 65535 (got 655350) (line 4)"
    (found,) = problems('[engine]\nbackend = "fake"\n[fallback]\nattempts = 61\n')
    assert found == "fallback.attempts: should be less than or equal to 16 (got 61) (line 4)"


def test_a_core_named_twice() -> None:
    core = min(os.sched_getaffinity(0))
    assert problems(f'[engine]\nbackend = "fake"\ncpus = [{core}, {core}]') == [
        "engine.cpus: names a core twice (line 3)"
    ]


def test_all_problems_at_once_in_the_order_of_lines_contradictions_included(tmp_path: Path) -> None:
    text = (
        "[node]\nnam = 'x'\n[engine]\nthreads = 'x'\n[links]\nheartbeat = 2\n[fake]\nwindow_layers = 9\n"
        "[[peers]]\nname = 'a'\naddress = '127.0.0.1:1'\n[http]\nhost = '0.0.0.0'\n"
    )
    found = problems(text)
    assert [p.split(":")[0] for p in found if "line" in p] == [
        "node.nam",
        "engine.threads",
        "links.heartbeat",
        "fake.window_layers",
        "http.host",
    ]
    # The lease's rule reads the heartbeat, which is wrong itself: nothing is said about the pair.
    assert not any("lease" in p for p in found)


def test_a_wrong_key_does_not_bring_follow_up_errors() -> None:
    found = problems(FAKE + "[http]\nhost = '0.0.0.0'\napi_key_file = 3")
    assert found == ['http.api_key_file: must be a path in quotes, or "" for none (got 3) (line 5)']


def test_peers_are_unique_by_name_and_address() -> None:
    text = FAKE + "".join(f"[[peers]]\nname = 'a'\naddress = '127.0.0.1:{port}'\n" for port in (1, 2))
    assert problems(text) == ["peers[1].name: 'a' is used by more than one peer (line 7)"]
    text = FAKE + "".join(f"[[peers]]\nname = '{name}'\naddress = 'localhost:1'\n" for name in "ab")
    assert problems(text) == ["peers[1].address: 'localhost:1' is used by more than one peer (line 8)"]


def test_prefilld_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    text = FAKE + "[listen]\nhost = '0.0.0.0'\n"
    assert (
        "listen.host: '0.0.0.0' can be reached from other machines: set security.key_file"
        in problems(text, PrefillConfig)[0]
    )
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 2 + "\n")
    key.chmod(0o600)
    config = cfg.parse_text(text + "[security]\nkey_file = 'key'", PrefillConfig, base=tmp_path)
    assert config.security.key_file == key


def test_prefilld_two_listeners_on_one_port() -> None:
    text = FAKE + "[listen]\nport = 7480\n"
    assert problems(text, PrefillConfig) == ["http.port: 7480 is already taken by listen.port"]


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"x" * 31, 0o600, "holds 31 bytes of secret, at least 32"),
        (b"x" * 31 + b"\n\n", 0o600, "holds 31 bytes of secret"),
        (b"x" * 64, 0o600, "holds only 1 different bytes"),
        (bytes(range(32, 96)), 0o604, "has mode 0604, which lets every user in: chmod o="),
        (bytes(range(32, 96)), 0o602, "has mode 0602"),
        (b"x" * (1 << 20) + b"y", 0o600, "is larger than 1MiB"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, content: bytes, mode: int, says: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    key.chmod(mode)
    assert says in problems(FAKE + f"[security]\nkey_file = '{key}'")[0]


def test_a_key_is_the_same_with_and_without_line_end(tmp_path: Path) -> None:
    secret = bytes(range(40, 80))
    keys = []
    for n, end in enumerate((b"", b"\n", b"\r\n")):
        path = tmp_path / str(n)
        path.write_bytes(secret + end)
        path.chmod(0o640)
        keys.append(cfg.read_key(path))
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32


def test_api_keys_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-one\n\n  sk-two \n")
    path.chmod(0o600)
    assert cfg.read_lines(path) == ("sk-one", "sk-two")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        cfg.read_lines(path)


def test_classes_have_names_of_their_own_and_shares_that_can_be_guaranteed(tmp_path: Path) -> None:
    def classes(*facts: tuple[str, int, float]) -> str:
        table = "[[admission.classes]]\nname = {!r}\npriority = {}\nshare = {}\n"
        return "[engine]\nbackend = 'fake'\n" + "".join(table.format(*one) for one in facts)

    def problems(text: str) -> str:
        with pytest.raises(ConfigError) as e:
            cfg.parse_text(text, DecodeConfig, base=tmp_path)
        return "; ".join(e.value.problems)

    good = cfg.parse_text(classes(("a", 5, 0.7), ("b", 0, 0.3)), DecodeConfig)
    assert [c.share for c in good.admission.service_classes] == [0.7, 0.3]
    assert "'a' is used twice" in problems(classes(("a", 5, 0.2), ("a", 0, 0.2)))
    assert "the shares add up to 1.1; at most 1" in problems(classes(("a", 5, 0.8), ("b", 0, 0.3)))
    assert "share" in problems(classes(("a", 5, 0.0)))
    assert "17 classes; at most 16" in problems(classes(*((f"c{n}", n, 0.01) for n in range(17))))
    keys = tmp_path / "keys"
    keys.write_text("sk-one a\nsk-two\nsk-three gold\n")
    keys.chmod(0o600)
    http = f"[http]\napi_key_file = '{keys}'\n"
    text = problems(http + classes(("a", 5, 0.7), ("b", 0, 0.3)))
    assert "class 'gold' of key 3; admission.classes: a, b" in text and "sk-" not in text


def test_bounds_may_be_inf() -> None:
    text = "[engine]\nbackend = 'fake'\n[admission]\ndeadline = {}\n[slo]\nttft = {}"
    config = cfg.parse_text(text.format('"2s"', '"inf"'), DecodeConfig)
    assert (config.admission.deadline, config.slo.ttft) == (2.0, math.inf)
    assert 'ttft = "inf"' in cfg.render(config) and 'deadline = "2s"' in cfg.render(config)
    for wrong in ("2", '"0s"', '"-1s"', "nan", "true"):
        with pytest.raises(ConfigError, match=r"admission\.deadline"):
            cfg.parse_text(text.format(wrong, '"1s"'), DecodeConfig)


def test_relative_paths_start_at_the_files_directory(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "c.toml").write_text("[model]\npath = 'model'\n[control]\nsocket = 'run/c.sock'\n")
    config = cfg.load(tmp_path / "c.toml", DecodeConfig)
    assert config.model.path == model_dir
    assert config.control.socket == tmp_path / "run" / "c.sock"


# What start-up would find


def machine_problems(model: Path, text: str = "", when: When = "start") -> list[str]:
    try:
        cfg.parse_text(f"[model]\npath = '{model}'\n{text}", PrefillConfig, environment=when)
    except ConfigError as error:
        return error.problems
    return []


def test_a_model_directory_is_checked_file_by_file(model_dir: Path) -> None:
    assert machine_problems(model_dir) == []
    (model_dir / "config.json").write_text("{ }")
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "model.safetensors").write_bytes(b"")
    found = machine_problems(model_dir)
    assert found == [
        f"model.path: {model_dir}/config.json has 3 bytes instead of the 2 that manifest.json lists. (line 2)",
        f"model.path: {model_dir}/tokenizer.json is missing, though manifest.json lists it. (line 2)",
        f"model.path: {model_dir}/model.safetensors is not listed in manifest.json: it does not belong to this model."
        " (line 2)",
    ]
    (model_dir / "manifest.json").write_text("{}")
    assert "manifest.json is not a valid manifest" in machine_problems(model_dir)[0]
    (model_dir / "manifest.json").unlink()
    assert "manifest.json is missing" in machine_problems(model_dir)[0]


def test_content_that_changed_shows_at_start_only(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[]")
    assert machine_problems(model_dir, when="check") == []


def test_a_device_is_looked_for_by_check_only(model_dir: Path) -> None:
    text = "[engine]\ndevice = 'cuda:99'\n"
    assert machine_problems(model_dir, text) == []
    (found,) = machine_problems(model_dir, text, "check")
    assert "engine.device: device 'cuda:99' was asked for but torch sees" in found


@pytest.mark.parametrize("key", ["control.socket", "log.trace_file"])
def test_files_to_be_made_need_a_directory(tmp_path: Path, model_dir: Path, key: str) -> None:
    section, name = key.split(".")
    for where, says in (
        ("none/x", f"{tmp_path}/none is not a directory, or may not be entered: make it first"),
        ("model", f"{model_dir} is a directory"),
    ):
        found = machine_problems(model_dir, f"[{section}]\n{name} = '{tmp_path}/{where}'\n")
        assert found == [f"{key}: {says} (line 4)"]
    assert machine_problems(model_dir, f"[{section}]\n{name} = '{tmp_path}/x'\n") == []


def test_a_trace_goes_into_a_regular_file(tmp_path: Path, model_dir: Path) -> None:
    """Opening a FIFO would wait for its reader."""
    os.mkfifo(tmp_path / "fifo")
    found = machine_problems(model_dir, f"[log]\ntrace_file = '{tmp_path}/fifo'\n")
    assert found == [f"log.trace_file: {tmp_path}/fifo is not a regular file (line 4)"]
    assert machine_problems(model_dir, "[log]\ntrace_file = '/dev/null'\n") == []


def test_a_state_dir_that_cannot_be_used_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "file").write_text("x")
    for where in ("/proc/xx", tmp_path / "file", tmp_path / "file" / "st", tmp_path / "none" / "st"):
        (found,) = machine_problems(model_dir, f"[node]\nstate_dir = '{where}'\n")
        assert found.startswith("node.state_dir: ") and "cannot be used" in found
    for where in (tmp_path, tmp_path / "new"):
        assert machine_problems(model_dir, f"[node]\nstate_dir = '{where}'\n") == []
    assert not (tmp_path / "new").exists()


def test_a_file_of_the_other_daemon_is_known_as_such() -> None:
    text = FAKE + "[listen]\nport = 1\n[limits]\nmax_queued_requests = 1\n"
    assert problems(text) == ["this looks like the file of prefilld, not of decoded: it has listen, limits"]
    text = FAKE + "[routing]\nmode = 'threshold'\n[[peers]]\nname = 'a'\n"
    says = "this looks like the file of decoded, not of prefilld: it has routing, peers"
    assert problems(text, PrefillConfig) == [says]
    # With a section of its own it is ours, and one too many is in it.
    assert problems(FAKE + "[limits]\n[routing]\nmode = 'threshold'\n")[0].startswith("limits: unknown key")


def test_the_sections_that_tell_the_daemons_apart_are_all_of_them() -> None:
    fields = {"prefilld": set(PrefillConfig.model_fields), "decoded": set(DecodeConfig.model_fields)}
    shared = fields["prefilld"] & fields["decoded"]
    assert {name: own - shared for name, own in fields.items()} == cfg.ONLY_IN


@pytest.mark.parametrize(("name", "says"), [("none.toml", "cannot be read"), ("latin.toml", "is not UTF-8")])
def test_files_that_cannot_be_read(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match=says):
        cfg.load(tmp_path / name, DecodeConfig)


def test_values_that_depend_on_the_device() -> None:
    config = cfg.parse_text('[engine]\nbackend = "fake"\nkv_dtype = "bfloat16"', DecodeConfig)
    assert (config.engine.num_chunk_tokens, config.engine.state_dtype) == (256, "bfloat16")
    cuda = cfg.parse_text('[engine]\nbackend = "fake"\ndevice = "cuda:1"', DecodeConfig)
    assert (cuda.engine.num_chunk_tokens, cuda.engine.state_dtype) == (2048, "float32")


@pytest.mark.parametrize(
    ("text", "value"), [('"inf"', math.inf), ("inf", math.inf), ("0", 0), ("1000", 1000), ('"auto"', None)]
)
def test_threshold(text: str, value: float | None) -> None:
    config = cfg.parse_text(f"{FAKE}[routing]\nthreshold_tokens = {text}", DecodeConfig)
    assert config.routing.threshold_tokens == value


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.7:7400", "10.0.0.7", 7400), ("[::1]:1", "::1", 1), ("a.example:65535", "a.example", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


def test_a_configuration_is_frozen() -> None:
    config = cfg.parse_text(FAKE, DecodeConfig)
    with pytest.raises(ValueError, match="frozen"):
        config.http.port = 1  # type: ignore[misc]


TRICKY = '''# comment [not.a.section]
top = """
[nope]
key = 1
"""
[a]
one = 1
"quoted key" = [
  1, # [x]
  2,
]
two.three = "# no comment"
[[p]]
x = { y = 1 }
[[p]]
[p.sub]
z = '[['
w = 3
'''


def test_lines_of_tables_and_keys_in_awkward_toml() -> None:
    assert locate(TRICKY) == {
        ("top",): 2,
        ("a",): 6,
        ("a", "one"): 7,
        ("a", "quoted key"): 8,
        ("a", "two", "three"): 12,
        ("p", 0): 13,
        ("p", 0, "x"): 14,
        ("p", 1): 15,
        ("p", 1, "sub"): 16,
        ("p", 1, "sub", "z"): 17,
        ("p", 1, "sub", "w"): 18,
    }


def test_changes_are_told_key_by_key_with_old_and_new() -> None:
    peer = "[[peers]]\nname = 'a'\naddress = 'localhost:1'\n"
    old = cfg.parse_text(FAKE + peer, DecodeConfig)
    new = cfg.parse_text(
        FAKE + "threads = 2\n" + peer.replace("'a'", "'b'") + "[routing]\nthreshold_tokens = 'inf'\n"
        "[links]\nheartbeat = '1s'\npiece_bytes = '64KiB'",
        DecodeConfig,
    )
    assert cfg.changes(old, old) == []
    assert cfg.changes(old, new) == [
        "engine.threads: 0 -> 2",
        'links.heartbeat: "2s" -> "1s"',
        'links.piece_bytes: "1MiB" -> "64KiB"',
        'peers: removed {name = "a", address = "localhost:1"}',
        'peers: added {name = "b", address = "localhost:1"}',
        'routing.threshold_tokens: "auto" -> "inf"',
    ]
    assert cfg.restart_problems(old, new, ("peers", "routing", "links")) == ["engine.threads: 0 -> 2 needs a restart"]
    assert cfg.restart_problems(old, new, ("peers", "routing", "engine", "links.heartbeat")) == [
        'links.piece_bytes: "1MiB" -> "64KiB" needs a restart'
    ]


def test_a_key_that_may_not_be_read_names_reader_owner_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(64)))
    key.chmod(0o400)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read everything, whatever the mode says
    with pytest.raises(ConfigError) as caught:
        cfg.read_key(key)
    who = rf"(user \S+ \()?uid {os.geteuid()}\)?"
    assert re.fullmatch(rf"{key} may not be read by {who}: {key} belongs to {who} and has mode 0400", str(caught.value))
