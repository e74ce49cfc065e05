"""`whorl bench sp`: the simulated table, what is refused, bytes by the kernel's count, and one run of it all."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from typer.testing import CliRunner

from whorl import collectives
from whorl.bench import network, sp, sp_rank
from whorl.cli import app
from whorl.passes.cost import TABLE, Traffic

# ---- simulated


def test_the_table_is_the_cost_models() -> None:
    done = CliRunner().invoke(app, ["bench", "sp", "--simulate", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert [(row["link"], row["ranks"]) for row in report["rows"]] == [(n, p) for n in TABLE for p in (2, 4, 8, 16)]
    for row in report["rows"]:
        traffic = Traffic.of_norm(8192, torch.bfloat16)
        assert row["min_tokens"] == TABLE[row["link"]].threshold(row["ranks"], traffic)
        for way in ("sp", "sp_int8", "sp, MLA"):
            assert len(row["speedup"][way]) == len(report["tokens"])
        assert max(row["speedup"]["sp"]) <= 1, "plain sequence parallelism sends as much as an all-reduce"
    ethernet = next(row for row in report["rows"] if (row["link"], row["ranks"]) == ("ethernet", 4))
    assert ethernet["speedup"]["sp_int8"][-1] == pytest.approx(1 / 0.75, rel=0.02)  # bytes are all that counts there
    assert ethernet["speedup"]["sp, MLA"][-1] == pytest.approx(1 / 0.647, rel=0.02)


def test_the_table_as_text() -> None:
    text = CliRunner().invoke(app, ["bench", "sp", "--simulate", "--hidden", "4096"]).output
    assert "[tokens, 4096]" in text
    assert all(name in text for name in TABLE)


# ---- refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "--rate is fast, expected bits per second such as 100mbit"),
        (["--rate", "1mbit", "--delay", "soon"], "--delay is soon, expected a time such as 500us"),
        (["--delay", "1ms"], "--delay needs --rate"),
        (["--hidden", "200"], "--hidden is 200, expected a multiple of 128"),
        (["--plot", "chart.txt"], "--plot is chart.txt, expected a file name that ends in"),
    ],
)
def test_asked_wrongly(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "sp", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_without_root_or_tools_a_link_is_refused_politely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(
        ValueError, match=r"bench sp: --rate: network namespaces need root\. Without --rate the ranks communicate"
    ):
        sp.SpSettings(rate="1mbit")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert network.refusal() == "ip and tc not found: install iproute2"
    monkeypatch.setattr(network.platform, "system", lambda: "Darwin")
    assert network.refusal() == "network namespaces need Linux, this is Darwin"
    sp.SpSettings()  # loopback needs nothing


def test_a_kernel_that_cannot_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(list(command))
        fails = "netem" in command
        return subprocess.CompletedProcess(command, int(fails), "", "Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(network, "refusal", lambda: None)
    monkeypatch.setattr(network.subprocess, "run", run)
    link = network.Link(rate="10mbit", delay="1ms")
    unknown = r"refused `tc .* netem delay 1ms.*qdisc kind is unknown"
    with pytest.raises(ValueError, match=unknown), network.namespaces(2, link):
        pytest.fail("there is no delay")
    made = [c[3] for c in ran if c[1:3] == ["netns", "add"]]
    assert [c[3] for c in ran if c[1:3] == ["netns", "del"]] == made, "what was made is taken away"
    assert len(made) == 3


# ---- bytes


def test_payload_is_counted_to_the_byte() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as receiver:
        before = sp_rank.payload_sent()
        sender.sendall(b"x" * 12345)
        left = 12345
        while left:
            left -= len(receiver.recv(left))
        assert sp_rank.payload_sent() - before == 12345
    listener.close()


def bytes_on_the_wire() -> dict[str, list[int]]:
    group, world = collectives.group_name(None), dist.get_world_size()
    x = torch.randn(301, 256).bfloat16()  # ranks do not divide 301
    calls = {
        "all_reduce": (lambda: collectives.ordered_all_reduce(x, group), 512),
        "reduce_scatter": (lambda: collectives.ordered_reduce_scatter(x, group), 512),
        "all_gather": (lambda: collectives.all_gather(collectives.local_rows(x, group), 301, group), 512),
        "quantized": (
            lambda: collectives.all_gather_quantized(collectives.local_rows(x, group), 301, group, "int8"),
            256 + 4,
        ),
    }
    sizes = {}
    for name, (call, row_bytes) in calls.items():
        call()
        dist.barrier()
        before = sp_rank.payload_sent()
        call()
        dist.barrier()  # what waits in the kernel is counted when it leaves
        sent = sp_rank.payload_sent() - before
        what = "all_gather" if name == "quantized" else name
        sizes[name] = [sent, collectives.wire_bytes(what, row_bytes, 301, world)]
    return sizes


@pytest.mark.slow
def test_collectives_send_what_the_report_counts() -> None:
    ranks = Ranks(3)
    by_rank = ranks.run(bytes_on_the_wire)
    ranks.stop()
    for answers in by_rank:
        for name, (sent, said) in answers.items():
            assert said <= sent < said * 1.02 + 1000, f"{name}: {sent} bytes, the report says {said}"
    total = {name: sum(a[name][0] for a in by_rank) for name in by_rank[0]}
    assert total["reduce_scatter"] < 0.52 * total["all_reduce"], "a true reduce-scatter is half an all-reduce"


# ---- all of it

DOCUMENT: dict[str, Any] = {
    "header": {
        "device_name": "a machine",
        "versions": {"torch": "2.13"},
        "network": "loopback",
        "load": 0.5,
        "settings": {"ranks": 2, "layers": 4, "hidden": 512, "tokens": 256, "repeats": 5, "rate": None},
    },
    "rows": [
        {
            "name": name,
            "seconds": seconds,
            "compute_seconds": 0.2,
            "predicted_seconds": 1.0,
            "speedup": 1 / seconds,
            "bytes_ratio": seconds,
            "payload_bytes": 1000.0,
            "report_bytes": 1000,
            "prediction_error": 0.1,
            "bytes_error": off,
            "communication_share": 0.8,
        }
        for name, seconds, off in (("all-reduce", 1.0, 0.0), ("SP + int8", 0.8, 0.001))
    ],
}


def test_shown(tmp_path: Path) -> None:
    text = sp.render(DOCUMENT)
    assert "SP + int8" in text
    assert "1.25x" in text
    assert "its times are not" in text
    assert sp.is_good(DOCUMENT)
    wrong = DOCUMENT | {"rows": [DOCUMENT["rows"][0] | {"bytes_error": 0.05}]}
    assert not sp.is_good(wrong)
    assert "BYTES SENT DIFFER FROM THE REPORT" in sp.render(wrong)
    pytest.importorskip("matplotlib")
    sp.write_plot(DOCUMENT, tmp_path / "plot.svg")
    assert "SP + int8" in (tmp_path / "plot.svg").read_text() or (tmp_path / "plot.svg").stat().st_size > 1000


def check_run(settings: sp.SpSettings) -> dict[str, Any]:
    report = sp.run(settings)
    assert sp.is_good(report), report
    rows = {row["name"]: row for row in report["rows"]}
    ratio = {name: row["bytes_ratio"] for name, row in rows.items()}
    assert ratio["SP"] == pytest.approx(1, abs=0.01)
    assert ratio["SP + int8"] == pytest.approx(0.75, abs=0.02)
    assert ratio["SP + MLA placement"] < 0.85  # the last gather is of the output, in full
    assert rows["SP"]["difference"] == rows["all-reduce"]["difference"] == 0
    assert 0 < rows["SP + int8"]["difference"] < 0.05
    return rows


@pytest.mark.slow
def test_measured_on_loopback() -> None:
    check_run(sp.SpSettings(tokens=129, hidden=256, layers=1, repeats=1, timeout=400))


@pytest.mark.slow
def test_measured_in_namespaces() -> None:
    if (reason := network.refusal()) is not None:
        pytest.skip(reason)  # namespaces of the network are for root, on Linux
    try:
        rows = check_run(sp.SpSettings(tokens=128, hidden=256, layers=1, repeats=1, rate="20mbit", timeout=400))
    except ValueError as refused:
        if "this kernel refused" not in str(refused):
            raise
        pytest.skip(str(refused))  # a kernel without the queue that limits the rate; other refusals are faults
    for row in rows.values():  # headers of Ethernet, IP and TCP on top
        assert row["payload_bytes"] < row["interface_bytes"] < 1.2 * row["payload_bytes"]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert f"whorl{os.getpid()}-" not in left
