"""Which replica a request goes to, without replicas: digests of prompts, load, staleness; and the options."""

import json
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import ray_packages
import yaml
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from whorl.cli import app
from whorl.cluster import command
from whorl.cluster.forwarded import BLOCK, MOST_BLOCKS, prompt_blocks
from whorl.cluster.options import ClusterOptions
from whorl.cluster.ray_cluster import actor_options, deployment_options
from whorl.cluster.routing import Routing
from whorl.engine.settings import EngineSettings
from whorl.extras import how_to_install
from whorl.serve.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"

# ---- digests of prompts


def blocks(salt: str = "", **body: Any) -> tuple[bytes, ...]:
    return prompt_blocks(json.dumps(body).encode(), salt)


def turn(role: str, letters: str) -> dict[str, str]:
    return {"role": role, "content": letters * BLOCK}


def test_a_conversation_that_goes_on_begins_with_what_it_was() -> None:
    said = [turn("system", "s"), turn("user", "a")]
    first = blocks(messages=said)
    second = blocks(messages=[*said, turn("assistant", "b"), turn("user", "c")])
    assert len(first) == 2
    assert second[:2] == first
    assert len(second) > len(first)


def test_a_block_stands_for_all_before_it() -> None:
    one, other = blocks(prompt="x" * BLOCK + "same" * BLOCK), blocks(prompt="y" * BLOCK + "same" * BLOCK)
    assert len(one) == len(other) == 5
    assert not set(one) & set(other)
    assert blocks(prompt="z" * (BLOCK - 1)) == (), "less than a block may be anybody's"


def test_what_is_before_the_messages_and_whose_cache_it_is() -> None:
    said = {"messages": [turn("user", "a")]}
    plain = blocks(**said)
    for other in (
        blocks(tools=[{"name": "f"}], **said),
        blocks(system="Be short.", **said),
        blocks(cache_salt="me", **said),
        blocks("key 1", **said),
    ):
        assert other[0] != plain[0]
    assert blocks(temperature=0.5, model="m", **said) == plain, "what is no part of the prompt changes nothing"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"{}", b'{"messages": 3}', b"[" * 100000, b"\xff"])
def test_a_body_without_a_prompt_has_no_blocks(body: bytes) -> None:
    assert prompt_blocks(body) == ()


def test_token_ids_half_characters_and_long_prompts() -> None:
    ids = list(range(1000))
    assert blocks(prompt=ids)[:3] == blocks(prompt=[*ids, 5])[:3]
    assert len(prompt_blocks(rb'{"prompt": "\ud800' + b"a" * BLOCK + b'"}')) == 1
    assert len(blocks(prompt="a" * (BLOCK * (MOST_BLOCKS + 9)))) == MOST_BLOCKS


# ---- the policy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def routing(names: str = "abc", **options: Any) -> Routing:
    made = Routing(**options)
    made.set_replicas(names)
    return made


def send(policy: Routing, number: str, prompt: tuple[bytes, ...]) -> str:
    name = policy.order(prompt)[0]
    policy.assign(number, name, prompt)
    return name


PROMPT = tuple(bytes([i]) for i in range(8))
OTHER = tuple(bytes([100 + i]) for i in range(8))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    policy = routing()
    first = send(policy, "1", PROMPT)
    policy.finish("1")
    assert send(policy, "2", OTHER) != first, "another prompt goes to who holds least"
    policy.finish("2")
    for number in range(3, 9):
        assert send(policy, str(number), (*PROMPT, bytes([number]))) == first
        policy.finish(str(number))


def test_a_queue_that_is_longer_than_the_prompt_is_not_waited_for() -> None:
    policy = routing("ab", request_cost=4.0)
    home = send(policy, "1", PROMPT)
    policy.mark_begun("1")
    assert send(policy, "2", PROMPT) == home, "4 blocks of load against 8 to read"
    assert send(policy, "3", PROMPT) != home, "8 of load and 0 to read against 8 to read: who holds less"
    assert policy.num_running() == {home: 2, "b" if home == "a" else "a": 1}


def test_a_prompt_that_is_being_read_is_load() -> None:
    policy = routing("ab")
    assert send(policy, "1", PROMPT) == "a"
    assert send(policy, "2", ()) == "b"
    assert policy.order(())[0] == "b", "4 against 4 and 8 blocks to read"
    policy.mark_begun("1")
    policy.assign("3", "b", ())
    assert policy.order(())[0] == "a", "it has been read"


def test_what_ended_is_no_load() -> None:
    policy = routing("ab")
    for number in "12":
        policy.assign(number, "a", ())
        policy.finish(number)
        policy.finish(number)
    policy.finish("never sent")
    assert policy.num_running() == {"a": 0, "b": 0}


def test_what_nobody_asked_for_long_ago_is_not_there() -> None:
    clock = Clock()
    policy = routing("ab", clock=clock, stale_seconds=100)
    policy.assign("1", "b", PROMPT)
    policy.finish("1")
    clock.now = 99
    assert policy.order(PROMPT)[0] == "b"
    clock.now = 101
    assert policy.order(PROMPT)[0] == "a"


def test_a_cache_has_room_for_so_much() -> None:
    policy = routing("ab", held_blocks=10)
    policy.assign("1", "b", PROMPT)
    policy.assign("2", "b", OTHER)
    policy.mark_begun("1")
    for number in "12":
        policy.finish(number)
    assert policy.order(OTHER)[0] == "b"
    assert policy.order(PROMPT)[0] == "a", "its first block had to go, the rest is of no use"


def test_a_lost_replica_is_forgotten_and_a_new_one_has_seen_nothing() -> None:
    policy = routing("ab")
    policy.assign("1", "b", PROMPT)
    policy.set_replicas("ac")
    assert policy.replica_of("1") is None
    policy.finish("1")
    assert policy.order(PROMPT) == ["a", "c"]
    policy.set_replicas("abc")
    assert policy.order(PROMPT) == ["a", "b", "c"], "a name that comes back is a new replica"
    policy.assign("2", "gone", PROMPT)
    assert policy.replica_of("2") is None
    assert Routing().order(PROMPT) == []


def test_a_request_that_moves_counts_once() -> None:
    policy = routing("ab")
    policy.assign("1", "a", PROMPT)
    policy.assign("1", "b", PROMPT)
    policy.assign("1", "b", PROMPT)
    assert policy.num_running() == {"a": 0, "b": 1}
    assert policy.replica_of("1") == "b"
    policy.mark_begun("1")
    policy.mark_begun("1")
    assert (policy.counts.requests, policy.counts.blocks, policy.counts.blocks_seen) == (1, 8, 0)
    policy.assign("2", "b", PROMPT)
    policy.mark_begun("2")
    assert (policy.counts.requests, policy.counts.blocks, policy.counts.blocks_seen) == (2, 16, 8)


def test_in_turn() -> None:
    policy = routing("abc", in_turn=True)
    assert [send(policy, str(i), PROMPT) for i in range(6)] == list("abcabc")


def history(seed: int) -> list[str]:
    """Of conversations that come and go in an order that the seed gives."""
    draw, policy = random.Random(seed), routing("abcd")
    went, running = [], []
    for number in range(300):
        talk = draw.randrange(12)
        went.append(send(policy, str(number), tuple(bytes([talk, i]) for i in range(draw.randrange(1, 20)))))
        running.append(str(number))
        policy.mark_begun(str(number))
        if len(running) > 8:
            policy.finish(running.pop(draw.randrange(len(running))))
    return went


def test_the_same_history_gives_the_same_choices() -> None:
    assert history(1) == history(1)
    assert history(1) != history(2)
    shares = [history(1).count(name) for name in "abcd"]
    assert min(shares) > 30, f"nobody is left out: {shares}"


def test_prefixes_are_found_more_often_than_in_turn() -> None:
    """Eleven conversations of growing length on four replicas, one after the other."""
    hit_rates = {}
    for in_turn in (False, True):
        policy = routing("abcd", in_turn=in_turn)
        for number in range(220):
            talk, length = number % 11, 4 + number // 11
            send(policy, str(number), tuple(bytes([talk, i]) for i in range(length)))
            policy.mark_begun(str(number))
            policy.finish(str(number))
        hit_rates[in_turn] = policy.counts.blocks_seen / policy.counts.blocks
    assert hit_rates[False] > 0.9
    assert hit_rates[True] < hit_rates[False] - 0.05


# ---- options


WRONG: dict[str, dict[str, Any]] = {
    "--replicas is 2, which needs a cluster: add --on ray": {"replicas": 2},
    "--routing is round_robin, which needs a cluster": {"routing": "round_robin"},
    "min_replicas is 1 and max_replicas is None: give both": {"on": "ray", "min_replicas": 1},
    "to start with is 3, expected --min-replicas 3 to --max-replicas 2": {
        "on": "ray",
        "min_replicas": 3,
        "max_replicas": 2,
    },
    "to start with is 5, expected --min-replicas 2 to --max-replicas 4": {
        "on": "ray",
        "replicas": 5,
        "min_replicas": 2,
        "max_replicas": 4,
    },
    "on is 'slurm', expected None or 'ray'": {"on": "slurm"},
    "leave out --ray-dashboard": {"on": "ray", "ray_address": "auto", "ray_dashboard": True},
}


@pytest.mark.parametrize(("message", "options"), WRONG.items())
def test_what_cannot_be(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterOptions(**options)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["serve", "--on", "ray", "--replicas", "2"])
    assert done.exit_code == 2
    assert f"--on ray needs ray, which is not installed: {how_to_install('ray')}" in done.output


def test_what_a_replica_takes_of_a_node() -> None:
    plain = ClusterOptions(on="ray")
    assert actor_options(EngineSettings(), plain, {"CPU": 8.0}) == {"num_cpus": 1}
    assert actor_options(EngineSettings(tp=2), plain, {"CPU": 8.0}) == {"num_cpus": 2}
    assert actor_options(EngineSettings(tp=4), plain, {"GPU": 8.0}) == {"num_cpus": 1, "num_gpus": 4}
    assert actor_options(EngineSettings(), plain, {"NPU": 8.0}) == {"num_cpus": 1, "resources": {"NPU": 1}}
    four = ClusterOptions(on="ray", replica_cpus=4)
    assert actor_options(EngineSettings(device="cpu"), four, {"GPU": 8.0}) == {"num_cpus": 4}


def test_how_many_replicas() -> None:
    engine, settings = EngineSettings(max_num_seqs=8), ServerSettings(timeout=30)
    fixed = deployment_options(engine, ClusterOptions(on="ray", replicas=3), settings)
    assert fixed["num_replicas"] == 3
    assert fixed["graceful_shutdown_timeout_s"] == 30, "one that is replaced finishes what it has"
    moving = deployment_options(engine, ClusterOptions(on="ray", min_replicas=2, max_replicas=5), settings)
    assert "num_replicas" not in moving
    assert moving["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 5,
        "initial_replicas": 2,
        "target_ongoing_requests": 6,
    }


# ---- the example for Kubernetes


def test_the_entrypoint_of_the_example_is_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    job, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "whorl"
    received: dict[str, Any] = {}

    def build_server(model: str, engine: EngineSettings, options: ClusterOptions, **more: Any) -> Any:
        received.update(more, model=model, engine=engine, options=options)
        return lambda: 0

    monkeypatch.setattr(command, "build_server", build_server)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    options, cluster = received["options"], job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    taken = actor_options(received["engine"], options, {"GPU": 2.0})
    (worker,) = workers["template"]["spec"]["containers"]
    assert taken["num_gpus"] == int(worker["resources"]["limits"]["nvidia.com/gpu"]), "a replica has room on a worker"
    assert (options.min_replicas, options.max_replicas) == (workers["minReplicas"], workers["maxReplicas"])
    head = cluster["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    (ports,) = head["spec"]["containers"][0]["ports"]
    assert received["port"] == ports["containerPort"] == service["spec"]["ports"][0]["targetPort"]
    assert received["host"] == "0.0.0.0"
    mounted = head["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert received["api_key_file"].startswith(mounted), "who can reach it needs a key"


def test_versions_of_ray_agree() -> None:
    job, _ = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["rayVersion"] in SpecifierSet(
        ray_packages.requirement().removeprefix("ray[serve]")
    )
    assert "'.[ray," in (DEPLOY / "Dockerfile").read_text()
