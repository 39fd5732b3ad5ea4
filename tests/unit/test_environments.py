"""Single turn and tool calling: messages, schemas, calls, deadlines; and a tool rollout whose tokens grow by exact ids."""

import asyncio
import json
from typing import Any, Literal, Optional

import pytest
import tools_for_tests
from rollout_fakes import END, CharTokenizer, FakeController, FakeEngine, assignment, config, ids_of

from slipstream.config.settings import DataSettings
from slipstream.environments import SingleTurn, ToolEnvironment, make_environment
from slipstream.environments.schema import json_type, tool_schema
from slipstream.environments.tool_calls import ToolCall, parse_tool_calls
from slipstream.environments.tools import MAX_CALLS_PER_TURN, Tool, load_tools
from slipstream.errors import ConfigError, DataError, DeadlineExceeded, RunFailed
from slipstream.protocols import Message
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.scoring.threads import ThreadCalls
from slipstream.types import StopReason

ROW = {"prompt": "hi", "answer": "3"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def environment(*functions: Any, timeout_s: float = 5.0) -> ToolEnvironment:
    tools = tuple(Tool(f.__name__, f, tool_schema(f), ThreadCalls(f"tool {f.__name__!r}", max_lost=2)) for f in functions)
    return ToolEnvironment(ROW, DataSettings(), tools, timeout_s)


def step(env: ToolEnvironment, text: str):
    return asyncio.run(env.step(Message(role="assistant", content=text)))


def answers(env: ToolEnvironment, text: str) -> list[Any]:
    return [m.content if m.content[:1] not in "{[" else json.loads(m.content) for m in step(env, text).messages]


def test_single_turn_shows_the_prompt_and_is_done_at_the_first_reply():
    async def main():
        env = SingleTurn(ROW, DataSettings(system_prompt="Be brief."))
        messages = await env.start()
        assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "hi")]
        assert (await env.step(Message(role="assistant", content="x"))).done
        await env.close()
        with pytest.raises(DataError, match="prompt"):
            await SingleTurn({"question": "x"}, DataSettings()).start()

    asyncio.run(main())


def test_make_environment_follows_the_settings():
    assert isinstance(make_environment(config(), ROW), SingleTurn)
    env = make_environment(config(environment="tools", tools=["tools_for_tests:add"]), ROW)
    assert isinstance(env, ToolEnvironment)
    assert env.tool_schemas[0]["function"]["name"] == "add"


def test_tools_that_do_not_load_are_named():
    with pytest.raises(ConfigError, match="tools_for_tests has no function 'sub'; it has: add, fail"):
        load_tools(("tools_for_tests:sub",))
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        load_tools(("tools_for_tests:add", "tools_for_tests:add"))


def test_a_schema_comes_from_signature_and_docstring():
    assert tool_schema(tools_for_tests.add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "the first"}, "b": {"type": "integer", "description": "the second"}},
                "required": ["a"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (list[float], {"type": "array", "items": {"type": "number"}}),
        (dict[str, int], {"type": "object"}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Optional[int], {"type": "integer"}),  # noqa: UP045 - the old spelling is to be understood too
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Any, {}),
        (ToolCall, {}),
    ],
)
def test_annotations_become_json_types(hint, schema):
    assert json_type(hint) == schema


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        ('["a", "b"]', []),  # JSON that is an answer
        ("[so they say]", []),
        ('{"answer": 4}', []),
        ('a <tool_call>{"name": "f"}</tool_call> b', [ToolCall("f", {})]),
        ('<tool_call>\n{"name": "f"}\n</tool_call><tool_call>{"name": "g"}', [ToolCall("f", {}), ToolCall("g", {})]),
        ('{"name": "f", "arguments": {"a": 1}}', [ToolCall("f", {"a": 1})]),
        ('[{"name": "f"}, {"name": "g", "parameters": {"x": []}}]', [ToolCall("f", {}), ToolCall("g", {"x": []})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", {"a": 1})]),
    ],
)
def test_tool_calls_are_found(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{nonsense</tool_call>", "not valid JSON"),
        ("<tool_call>5</tool_call>", "an object"),
        ('<tool_call>{"name": 5}</tool_call>', "an object"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_malformed_calls_carry_their_error(text, error):
    (found,) = parse_tool_calls(text)
    assert found.error is not None and error in found.error


def test_calls_are_answered_in_their_order_sync_and_async():
    env = environment(tools_for_tests.add, tools_for_tests.shout)
    reply = step(env, call("shout", text="hi") + call("add", a=1, b=2))
    assert [(m.role, m.name, m.content) for m in reply.messages] == [("tool", "shout", '{"text": "HI"}'), ("tool", "add", "3")]
    assert not reply.done
    assert step(env, "it is 3").done


def test_calls_of_one_reply_run_at_the_same_time():
    assert answers(environment(tools_for_tests.meet), call("meet") * 2) == ["met", "met"]


def test_what_goes_wrong_is_told_to_the_model():
    env = environment(tools_for_tests.add, tools_for_tests.fail)
    texts = answers(env, call("sub") + call("add", x=1) + call("fail", code=7) + "<tool_call>{</tool_call>" + call("add", a="x", b=2))
    assert texts[0] == {"error": "there is no tool 'sub'; there are: add, fail"}
    assert "missing a required argument" in texts[1]["error"]
    assert texts[2] == {"error": "KeyError: 7"}
    assert "not valid JSON" in texts[3]["error"]
    assert texts[4]["error"].startswith("TypeError")


def test_more_calls_than_allowed_are_not_made():
    texts = answers(environment(tools_for_tests.add), call("add", a=1) * (MAX_CALLS_PER_TURN + 2))
    assert texts[:MAX_CALLS_PER_TURN] == ["2"] * MAX_CALLS_PER_TURN
    assert ["at most" in t["error"] for t in texts[MAX_CALLS_PER_TURN:]] == [True, True]


def test_a_late_call_is_told_and_too_many_lost_threads_end_the_run():
    tools_for_tests.release.clear()
    env = environment(tools_for_tests.hang, timeout_s=0.05)
    try:
        assert answers(env, call("hang")) == [{"error": "hang did not answer within 0.05 s"}]
        with pytest.raises(RunFailed, match="tool 'hang' did not answer"):
            step(env, call("hang"))
    finally:
        tools_for_tests.release.set()


def roll_out(engine: FakeEngine, max_context: int = 1000, deterministic: bool = False, **rollout: Any):
    settings = config(group_size=1, max_new_tokens=80, environment="tools", **{"tools": ["tools_for_tests:add"], **rollout})
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"deterministic": deterministic})})

    async def main():
        controller = FakeController([assignment(row=ROW)])
        worker = RolloutWorker(controller, engine, CharTokenizer(), settings, make_scorers(settings.reward), max_context=max_context)
        running = asyncio.create_task(worker.run())
        finished = asyncio.create_task(controller.until(lambda: controller.groups))
        await asyncio.wait({running, finished}, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        await worker.stop(0)
        await running
        return controller.groups[0].rollouts[0], controller

    return asyncio.run(main())


CALL = call("add", a=1, b=2)


def scripted(*turns: str):
    return lambda request: [*ids_of(turns[request.turn]), END]


def test_a_tool_rollout_grows_by_exact_ids_and_trains_no_tool_output():
    engine = FakeEngine(scripted(CALL, "3"))
    rollout, controller = roll_out(engine, max_turns=3)
    tool = ids_of("[t]3<end>[a]")
    ids = rollout.token_ids.tolist()
    assert ids[rollout.prompt_length :] == [*ids_of(CALL), END, *tool, ord("3"), END]
    assert rollout.loss_mask.tolist() == [False] * rollout.prompt_length + [True] * (len(CALL) + 1) + [False] * len(tool) + [True] * 2
    assert [t.role for t in rollout.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert [(t.start, t.end) for t in rollout.turns][1:] == [
        (rollout.prompt_length, rollout.prompt_length + len(CALL) + 1),
        (rollout.prompt_length + len(CALL) + 1, len(ids) - 2),
        (len(ids) - 2, len(ids)),
    ]
    assert rollout.turns[3].terminated
    assert sum(s.end - s.start for s in rollout.spans) == rollout.loss_mask.sum()
    first, second = engine.requests
    assert second.token_ids.tolist() == ids[:-2]  # what was sampled, not a rendering of it
    assert (first.turn, second.turn, second.num_sampled) == (0, 1, len(CALL) + 1)
    assert rollout.completion == f"{CALL}\n3" and rollout.status.ok
    (end,) = controller.chunks  # a multi-turn rollout starts over after a crash: only its end is told
    assert (end.start, len(end.token_ids), end.stop_reason) == (0, 0, StopReason.STOP)


def test_in_a_deterministic_run_a_late_call_ends_the_run():
    tools_for_tests.release.clear()
    hangs = {"tools": ["tools_for_tests:hang"], "tool_timeout_s": 0.05, "max_turns": 2}
    try:
        with pytest.raises(DeadlineExceeded, match=r"tool 'hang' did not answer within 0\.05 s.*deterministic run"):
            roll_out(FakeEngine(scripted(call("hang"), "3")), deterministic=True, **hangs)
        rollout, _ = roll_out(FakeEngine(scripted(call("hang"), "3")), **hangs)
        assert rollout.status.ok and "did not answer within" in CharTokenizer().decode(rollout.token_ids.tolist())
    finally:
        tools_for_tests.release.set()


def test_the_last_turn_is_truncated_where_the_model_would_call_on():
    rollout, _ = roll_out(FakeEngine(scripted(CALL, CALL)), max_turns=2)
    assert [t.role for t in rollout.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert rollout.turns[3].truncated and not rollout.turns[3].terminated
    assert rollout.status.ok and rollout.reward == 0.0


def test_a_conversation_that_fills_the_context_is_cut_and_scored():
    context = roll_out(FakeEngine(scripted("x")))[0].prompt_length + 80
    engine = FakeEngine(scripted(CALL, "3" * 100))
    rollout, _ = roll_out(engine, max_context=context, max_turns=5)
    assert len(rollout.token_ids) <= context
    assert rollout.stop_reason is StopReason.LENGTH
    assert rollout.status.ok
